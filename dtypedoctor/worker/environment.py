"""What a worker runs on and what its run takes: versions and devices, memory, digests of what was trained.

As a program it prints a description of the machine.
"""

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor.instrument.module_tree import named_tensors
from dtypedoctor.instrument.statistics import local_part
from dtypedoctor.unpatched import listdir, read_text, to_json

PACKAGES = (
    "torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate", "datasets", "triton", "safetensors",
    "tokenizers", "numpy", "unsloth", "unsloth_zoo", "axolotl", "nemo_automodel", "nemo_toolkit", "vllm", "flash_attn",
    "xformers", "deepspeed", "liger_kernel", "transformer_engine", "huggingface_hub",
)  # fmt: skip
VARIABLES = (
    "ACCELERATE_MIXED_PRECISION", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "TORCH_LOGS", "UNSLOTH_FORCE_FLOAT32",
    "UNSLOTH_ENABLE_LOGGING", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "WORLD_SIZE",
)  # fmt: skip
"""Variables that steer precision, kernels or logging; no other one is ever recorded."""

DRIVER = Path("/sys/module/nvidia/version")
"""Where Linux says which NVIDIA driver is loaded."""
_INSTALLED = re.compile(r"(.+?)-(.+?)(?:-py[0-9.]+)?\.(?:dist|egg)-info")
"""The name of the folder that an installer leaves for a package: its name and its version."""


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, CPU capability and the environment variables that steer precision.

    Nothing here opens a file by a function that the program may have replaced, or starts a program, as the modules ``platform`` and
    ``importlib.metadata`` do.
    """
    system = os.uname()
    versions = _versions()
    values: dict[str, Any] = {
        "python": sys.version.split()[0],
        "platform": f"{system.sysname}-{system.release}-{system.machine}{_libc()}",
        "machine": system.machine,
        "device": str(device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "versions": {name: versions[name] for name in PACKAGES if name in versions},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        values["gpu"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "count": torch.cuda.device_count(),
            "cudnn": torch.backends.cudnn.version(),
        }
    return values


def _versions() -> dict[str, str]:
    """The version of each installed package, by its name with underscores; of several the one that an import finds."""
    found: dict[str, str] = {}
    for place in sys.path:
        try:
            names = listdir(place or ".")
        except OSError:  # no folder, or none that may be read
            continue
        for name in names:
            if parts := _INSTALLED.fullmatch(name):
                found.setdefault(re.sub(r"[-.]", "_", parts[1]).lower(), parts[2])
    return found | {"torch": str(torch.__version__)}  # with its build, which PyPI's wheels leave out of their name


def _libc() -> str:
    try:
        return "-with-" + (os.confstr("CS_GNU_LIBC_VERSION") or "").replace(" ", "")
    except (OSError, ValueError):  # not Linux with glibc
        return ""


def _driver() -> str | None:
    try:
        return read_text(DRIVER).strip()
    except OSError:  # no such driver, or not Linux
        return None


def resident() -> int:
    """Bytes of memory that the process has resident now; 0 where the system does not say."""
    return memory_of("VmRSS")


def peak_resident() -> int:
    """The largest number of bytes that the process has had resident; 0 where the system does not say."""
    return memory_of("VmHWM")


def memory_of(field: str, file: str = "/proc/self/status") -> int:
    """A line ``KEY: N kB`` of a file of the kernel, in bytes; 0 where the system does not say."""
    try:
        lines = read_text(file).splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def checksum(model: nn.Module) -> str:
    """SHA-256 over the names and bytes of the trainable parameters."""
    digest = hashlib.sha256()
    trained = {name: parameter for name, parameter in named_tensors(model, buffers=False) if parameter.requires_grad}
    there = [name for name, parameter in trained.items() if parameter.device.type == "cuda"]
    # 6 GB take seconds to the host and through SHA-256, and milliseconds where they are
    digests = dict(zip(there, tensor_digests([local_part(trained[name]) for name in there]), strict=True))
    for name, parameter in trained.items():
        digest.update(name.encode())
        digest.update(digests[name].to_bytes(8, "little", signed=True) if name in digests else _bytes(parameter))
    return digest.hexdigest()


_WORDS_AT_A_TIME = 1 << 22
_WORD = 8
"""Bytes of a word."""
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd 64-bit constants of splitmix64 and MurmurHash3, as signed numbers."""


def tensor_digests(tensors: Sequence[Tensor]) -> list[int]:
    """Of each tensor 64 bits that depend on each of its bits and on where that stands, computed on its device.

    Each 64-bit word is mixed with its position in a chunk, and the results of a chunk are added modulo 2^64: in whatever order that is done, the
    sum is the same. The sums of the chunks are the digits of the digest, in base of an odd number.
    """
    places: dict[torch.device, Tensor] = {}
    totals = [
        _digest(tensor, places) for tensor in tensors
    ]  # the host waits for a device only after it has been given all
    return [int(total) for total in totals]


def _digest(tensor: Tensor, places: dict[torch.device, Tensor]) -> Tensor:
    """The digest of one tensor, on its device; ``places`` keeps what only depends on the device."""
    flat = tensor.detach().as_subclass(Tensor).contiguous().flatten().view(torch.uint8)
    if rest := flat.numel() % _WORD:
        flat = torch.cat([flat, flat.new_zeros(_WORD - rest)])
    elif flat.storage_offset() % _WORD:
        flat = flat.clone()
    words = flat.view(torch.int64)
    device = words.device
    if device not in places:
        places[device] = torch.arange(_WORDS_AT_A_TIME, device=device) * _ODD[0]
    total = torch.zeros((), dtype=torch.int64, device=device)
    for part in words.split(_WORDS_AT_A_TIME):
        mixed = (part + places[device][: part.numel()]).mul_(_ODD[1])
        mixed.bitwise_xor_(mixed >> 29).mul_(_ODD[2])
        total = total * _ODD[0] + mixed.bitwise_xor_(mixed >> 32).sum()
    return total


class StepDigest:
    """SHA-256 over the bytes of the parameters of each optimizer, and of their gradients, after each of its steps."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._steps = 0

    def add(self, optimizer: Optimizer) -> None:
        """The optimizer has just made a step."""
        self._steps += 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._digest.update(_bytes(parameter))
                if parameter.grad is not None:
                    self._digest.update(_bytes(parameter.grad))

    @property
    def value(self) -> str | None:
        """The digest; None if no optimizer has made a step."""
        return self._digest.hexdigest() if self._steps else None


def _bytes(tensor: Tensor) -> bytes:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    found: bytes = local_part(dense).contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()
    return found


if __name__ == "__main__":
    print(to_json(describe_environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))))
