"""What the worker runs on."""

import os
import platform
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from dtypedoctor.unpatched import read_text

PACKAGES = (
    "torch", "transformers", "peft", "trl", "bitsandbytes", "accelerate", "datasets", "triton", "safetensors",
    "tokenizers", "numpy", "unsloth", "unsloth_zoo", "axolotl", "nemo_automodel", "nemo_toolkit", "vllm", "flash_attn",
    "xformers", "deepspeed", "liger_kernel", "transformer_engine",
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


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, CPU capability and the environment variables that steer precision."""
    values: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "device": str(device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
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


@cache  # asked again at the end, when the program may have replaced what reads files
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    try:
        return read_text(DRIVER).strip()
    except OSError:  # no such driver, or not Linux
        return None
