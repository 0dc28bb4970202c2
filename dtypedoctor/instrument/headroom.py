"""How much memory the doctor's own experiments may take, so that the program's peak is not raised noticeably."""

import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["bytes_of", "fits"]

AT_LEAST = 20 << 20
"""Bytes that an experiment may take in any program."""
SHARE = 0.015
"""Share of what the program itself holds that it may take besides."""

_STATM = Path("/proc/self/statm")


def fits(needed: int, device: torch.device) -> bool:
    """Whether an experiment may take ``needed`` bytes on ``device``, of which it keeps nothing beyond the call that it is made in."""
    return needed <= AT_LEAST or needed <= AT_LEAST + SHARE * _held(device)


def bytes_of(tensors: Iterable[Tensor], itemsize: int = 0) -> int:
    """Bytes of copies of ``tensors``, with elements of ``itemsize`` bytes instead of their own where it is given."""
    return sum(t.numel() * (itemsize or t.element_size()) for t in tensors)


def _held(device: torch.device) -> int:
    """Bytes that the program holds on ``device``; 0 where that is not known."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
