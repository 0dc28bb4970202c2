"""Positions that half precision has rounded together.

Half precision has no 257 in bfloat16 and no 2049 in float16: neighbouring tokens of a longer text get the same position. A
tensor is taken for positions when it counts by ones; it matters once arithmetic is done with the rounded numbers.
"""

import sys
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dtypedoctor._torch_private import schema_of
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.silent.look import Seen
from dtypedoctor.instrument.silent.notes import Notes
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.instrument.whereabouts import OUTSIDE, Whereabouts
from dtypedoctor.trace.records.silent import RoundedPositions

HALF = (torch.float16, torch.bfloat16)
SHORTEST = 257
"""Fewer whole numbers from 0 on are exact in both formats."""

_MAKERS = frozenset({"arange", "_to_copy", "to"})
_STILL_POSITIONS = _MAKERS | {"view", "_unsafe_view", "unsqueeze", "expand", "transpose", "t", "slice", "clone", "add", "sub",
                              "clamp", "neg"}  # fmt: skip
"""Ops whose result says where a token is, as their operand did."""
_ARITHMETIC = frozenset({"mul", "div", "mm", "bmm", "addmm", "baddbmm", "sin", "cos", "exp", "pow"})
"""Ops that make something else of a position: an angle, a slope, a distance."""


@dataclass(slots=True)
class PositionCheck:
    """Writes a :class:`RoundedPositions` for positions that were rounded together and then used."""

    notes: Notes
    whereabouts: Whereabouts
    _rounded: dict[int, tuple[RoundedPositions, str | None]] = field(default_factory=dict)

    def end(self) -> None:
        """Forgets the call."""
        self._rounded.clear()

    def saw(self, seen: Seen) -> None:
        """Notes positions that are rounded, follows views of them, and tells of the first arithmetic with them."""
        name = schema_of(seen.func).name.removeprefix("aten::").rstrip("_")
        if self._rounded:
            self._note_use(seen, name)
        if name in _MAKERS and seen.results and measurable(seen.results[0]) and seen.results[0].dtype in HALF:
            self._note_rounding(seen, seen.results[0])

    def _note_rounding(self, seen: Seen, result: Tensor) -> None:
        length = result.shape[-1] if result.dim() else 0
        if length < SHORTEST:
            return
        first = result.reshape(-1, length)[0].double()
        exact = _whole_numbers(seen, first)
        if exact is None or not bool((exact.diff() == 1).all()) or torch.equal(exact, first):
            return
        place = self.whereabouts.here(sys._getframe(), "cpu")
        told = RoundedPositions(
            op=seen.name,
            source=place.source,
            dtype=dtype_name(result),
            length=length,
            distinct=int(first.unique().numel()),
            largest_error=float((exact - first).abs().max()),
        )
        self._rounded[seen.number(result)] = told, place.fqn if place.root != OUTSIDE else None

    def _note_use(self, seen: Seen, name: str) -> None:
        known = [self._rounded.get(seen.number(t)) for t in seen.operands]
        found = next((one for one in known if one is not None), None)
        if found is None:
            return
        if name in _STILL_POSITIONS:
            self._rounded.update({seen.number(result): found for result in seen.results})
        elif name in _ARITHMETIC and not (name == "div" and known[0] is None):  # a mean divides by a count
            used_at = self.whereabouts.here(sys._getframe(), "cpu").source
            told, fqn = found
            self.notes.once(replace(told, used_by=seen.name, used_at=used_at), (fqn, told.source), fqn)


def _whole_numbers(seen: Seen, rounded: Tensor) -> Tensor | None:
    """What the positions were before they were rounded, in float64; None for a cast of something in half precision already."""
    if not seen.operands:
        start = rounded[0]
        return start + torch.arange(len(rounded), dtype=torch.float64, device=rounded.device)
    source = seen.operands[0]
    if source.dtype in HALF or source.dtype is torch.bool or source.is_complex():
        return None
    return source.reshape(-1, source.shape[-1])[0].double()
