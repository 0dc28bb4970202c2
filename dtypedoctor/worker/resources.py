"""How much memory a run takes."""

import gc
import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor.instrument.statistics import local_part
from dtypedoctor.unpatched import read_text


class MemoryMeter:
    """Peak memory over what was in use when the meter was made.

    On CUDA the allocator's peak; on a CPU the peak resident size of the process as Linux counts it (``VmHWM``), which is
    reset first. Where the kernel does not allow the reset the peak is that of the whole process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._base = torch.cuda.memory_allocated(device)
        else:
            _reset_peak()
            self._base = resident()

    def peak(self) -> int:
        """Bytes over the baseline."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._base
        return max(0, peak_resident() - self._base)


def resident() -> int:
    """Bytes of memory that the process has resident now; 0 where the system does not say."""
    return _status("VmRSS")


def peak_resident() -> int:
    """The largest number of bytes that the process has had resident; 0 where the system does not say."""
    return _status("VmHWM")


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _status(field: str) -> int:
    try:
        lines = read_text("/proc/self/status").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def checksum(model: nn.Module) -> str:
    """SHA-256 over the names and bytes of the trainable parameters."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            digest.update(name.encode())
            digest.update(_bytes(parameter))
    return digest.hexdigest()


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
