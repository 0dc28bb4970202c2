"""Tensors that are made of Python's numbers: what the numbers were before the tensor's dtype rounded them, or made inf of them."""

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from dtypedoctor._torch_private import CASTS_TO
from dtypedoctor.instrument.frames import Line, line_of, number_given, users_frame
from dtypedoctor.instrument.operators import Arguments
from dtypedoctor.instrument.statistics import out_of_their_sight

LIFT = "aten.lift_fresh.default"
"""The operator that is given a tensor which has just been made of Python's numbers."""
NUMBERS = 4_096
"""Numbers of a tensor that are read again where the program's source has them."""
_DIGITS = {torch.float16: -1, torch.bfloat16: -1, torch.float32: 2**24}
"""Beyond which magnitude the numbers are looked up: of half precision always, since 1e-8 may have become 0."""


@dataclass(frozen=True, slots=True)
class Lifted:
    """A tensor of Python's numbers, which are known.

    Attributes:
        tensor: as the program has it.
        exact: the numbers in float64, in the same shape and on the same device.
        line: that makes the tensor.
        overflows: whether a finite number has become inf.
    """

    tensor: Tensor
    exact: Tensor
    line: Line | None
    overflows: bool

    @property
    def cast(self) -> tuple[Any, Arguments]:
        """The operator that makes the tensor of the exact numbers, and its arguments."""
        return CASTS_TO, ((self.exact,), {"dtype": self.tensor.dtype})


def lifted_from(tensor: Tensor) -> Lifted | None:
    """Looks up the numbers that ``tensor`` has just been made of, in the source of the program's line; None where they are not known.

    That they are what the tensor holds is compared; on a device, where that waits, only where its dtype does not hold them.
    """
    if tensor.dtype not in _DIGITS or tensor.is_meta or not 0 < tensor.numel() <= NUMBERS:
        return None
    frame = users_frame(sys._getframe())
    with out_of_their_sight():
        exact = _numbers_of(tensor, frame) if frame is not None else None
        if exact is None:
            return None
        rounded = exact.to(tensor.dtype)
        overflows = bool((~rounded.isfinite() & exact.isfinite()).any())
        if (overflows or not tensor.is_cuda) and not torch.equal(rounded, tensor.cpu()):
            return None  # it was made of something else
        return Lifted(tensor, exact.to(tensor.device), line_of(frame), overflows)


def _numbers_of(tensor: Tensor, frame: FrameType) -> Tensor | None:
    """The numbers that stand where a tensor is made, in float64 on the host; None where they are not known, or as exact in the tensor."""
    if not tensor.is_cuda and float(tensor.abs().max()) <= _DIGITS[tensor.dtype]:
        return None
    given = number_given(frame)
    exact = torch.tensor(given, dtype=torch.float64, device="cpu") if given is not None else None
    return exact if exact is not None and exact.shape == tensor.shape else None
