"""Tensors that are made of Python's numbers: what the numbers were before the tensor's dtype rounded them, or made inf of them."""

import math
import sys
from dataclasses import dataclass
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
_DIGITS = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 2**24}
"""From which magnitude on the numbers are looked up."""


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
    most, is_here = _DIGITS.get(tensor.dtype, math.inf), tensor.device.type == "cpu"
    if most == math.inf or tensor.is_meta or not 0 < tensor.numel() <= NUMBERS:
        return None
    frame = users_frame(sys._getframe())
    with out_of_their_sight():
        given = number_given(frame) if frame is not None and (not is_here or float(tensor.abs().max()) > most) else None
        if given is None:
            return None
        exact = torch.tensor(given, dtype=torch.float64, device="cpu")
        rounded = exact.to(tensor.dtype)
        overflows = bool((~rounded.isfinite() & exact.isfinite()).any())
        if exact.shape != tensor.shape or ((is_here or overflows) and not torch.equal(rounded, tensor.cpu())):
            return None  # it was made of something else
        return Lifted(tensor, exact.to(tensor.device), line_of(frame), overflows)
