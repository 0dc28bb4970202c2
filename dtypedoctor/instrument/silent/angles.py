"""Angles of rotary and sinusoidal embeddings that half precision has rounded: in tables, and where sines are taken."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtypedoctor._torch_private import schema_of
from dtypedoctor.instrument.naming import dtype_name, short_name
from dtypedoctor.instrument.silent.look import Seen
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.silent.shadows import Shadows
from dtypedoctor.trace.records.silent import RoundedAngles

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

HALF = {torch.bfloat16: 8, torch.float16: 11}
"""Significant bits."""
FIRST_INEXACT = 257
"""bfloat16 lacks it; a table with fewer rows is exact in its first column."""
WRONG, ALIKE = 0.1, 0.02
"""Differences of sines; the second one allows for a table that was cast to bfloat16 when it was finished."""
RADIANS = 0.25
"""Errors of an angle from here on matter."""
MOST_NUMBERS = 1 << 16

_SAME_VALUES = frozenset({"view", "_unsafe_view", "unsqueeze", "expand", "transpose", "t", "slice", "clone", "cat", "repeat",
                          "permute", "squeeze", "select", "_to_copy", "to"})  # fmt: skip
_SCALED = frozenset({"mul", "div", "mm", "bmm", "add", "sub", "neg"})


def rounded_table(name: str, table: Tensor) -> RoundedAngles | None:
    """What is wrong with a buffer whose rows are sines or cosines of positions; None where nothing is, or it holds something else.

    Row ``p`` begins with ``cos(p)`` or ``sin(p)``, since the first frequency is 1. In a table of rounded angles it is that of
    ``p`` rounded, which no other content of a buffer is.
    """
    rows = table.squeeze()
    if rows.dim() != 2 or len(rows) < FIRST_INEXACT:
        return None
    first = rows[:, 0].double()
    exact = torch.arange(len(rows), dtype=torch.float64, device=rows.device)
    for half in HALF:
        rounded = exact.to(half).double()
        for wave in (torch.cos, torch.sin):
            off = (first - wave(exact)).abs()
            if bool(off.max() > WRONG) and bool((first - wave(rounded)).abs().max() < ALIKE):
                position = int(off.argmax())
                return RoundedAngles(
                    name=name,
                    dtype=short_name(half),
                    largest=float(len(rows) - 1),
                    error=float((exact - rounded).abs().max()),
                    deviation=float(off[position]),
                    position=position,
                )
    return None


@dataclass(slots=True)
class _Rounded:
    """Whole numbers before and after a cast to half precision, and where that was."""

    whole: Tensor
    half: Tensor
    op: str
    source: str | None


class AngleCheck(Observer):
    """Writes a :class:`RoundedAngles` for a sine or cosine whose angle half precision has rounded by a good part of a turn.

    Either whole numbers (timesteps, positions) were cast on the way to it, in the call or before, and are compared with what they were; or the angle itself
    has the values of a half-precision tensor and is so large that neighboring values are far apart. Angles with a gradient are
    activations and not looked at.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._whole: dict[int, _Rounded] = {}
        self._half: dict[int, torch.dtype] = {}

    def look_ended(self) -> None:
        """Forgets the call."""
        self._whole.clear()
        self._half.clear()

    def saw(self, seen: Seen) -> None:
        """Follows what was rounded to where its sine is taken."""
        if not seen.operands or not seen.results:
            return
        name = schema_of(seen.func).name.removeprefix("aten::").rstrip("_")
        if name in ("sin", "cos"):
            if not seen.operands[0].requires_grad:
                self._judge(seen)
        elif name in _SAME_VALUES or name in _SCALED:
            self._follow(seen, name)

    def _follow(self, seen: Seen, name: str) -> None:
        operand, number = seen.operands[0], seen.number(seen.results[0])
        rounded = self._rounded_of(seen)
        if rounded is not None:
            self._whole[number] = rounded
        elif _is_rounding(operand, seen.results[0]):
            self._whole[number] = _Rounded(operand, seen.results[0], seen.name, self.here()[0])
        if name in _SAME_VALUES:
            half = operand.dtype if operand.dtype in HALF else self._half.get(seen.number(operand))
            if half is not None:
                self._half[number] = half

    def _rounded_of(self, seen: Seen) -> _Rounded | None:
        """What is known of an operand's whole numbers, which the call may have been given in half precision."""
        known = (self._whole.get(seen.number(tensor)) for tensor in seen.operands) if self._whole else ()
        rounded = next((one for one in known if one is not None), None)
        before = self.checks[Shadows].rounded(seen.operands[0]) if rounded is None else None
        if before is None or not before[1].whole:
            return rounded
        exact, origin = before
        return _Rounded(exact, seen.operands[0], origin.op, origin.source or None)

    def _judge(self, seen: Seen) -> None:
        angles = seen.operands[0]
        number = seen.number(angles)
        half = angles.dtype if angles.dtype in HALF else self._half.get(number)
        rounded = self._whole.get(number)
        if half is None and rounded is None:
            return
        line, fqn = self.here()
        largest = float(angles.abs().max()) if angles.numel() else 0.0
        told = _of_whole_numbers(rounded, largest) if rounded is not None else None
        if told is None and half is not None:
            told = _of_angles(half, largest, seen.name, line)
        if told is not None:
            self.session.once(told, (fqn, told.source), fqn)


def _is_rounding(operand: Tensor, result: Tensor) -> bool:
    whole = not (operand.is_floating_point() or operand.is_complex() or operand.dtype is torch.bool)
    return whole and result.dtype in HALF and operand.numel() <= MOST_NUMBERS


def _of_whole_numbers(rounded: _Rounded, largest: float) -> RoundedAngles | None:
    """Whole numbers that the cast has changed, by how much of an angle; ``largest`` is that of the largest number."""
    exact, used = rounded.whole.double(), rounded.half.double()
    apart, top = float((exact - used).abs().max()), float(used.abs().max())
    error = apart * largest / top if 0.0 < top < float("inf") else 0.0
    if error < RADIANS:
        return None
    dtype = dtype_name(rounded.half)
    return RoundedAngles(op=rounded.op, source=rounded.source, dtype=dtype, largest=top, error=error, apart=apart)


def _of_angles(half: torch.dtype, largest: float, op: str, source: str | None) -> RoundedAngles | None:
    """Angles of which half of the distance to the next is more than :data:`RADIANS`."""
    if not 0.0 < largest < float("inf"):
        return None
    error = float(2.0 ** (torch.tensor(largest).log2().floor() - HALF[half]))
    return (
        RoundedAngles(op=op, source=source, dtype=short_name(half), largest=largest, error=error)
        if error >= RADIANS
        else None
    )
