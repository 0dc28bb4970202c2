"""Casts from float to int that cut off what an activation says.

Most such casts are meant: token ids, bins, indices, lengths. They are used to look something up or to compare. A cast that
goes wrong, ``x.to(weight.dtype)`` with a packed weight say, is used as a number: it returns to floating point, by a cast or
by the next product, and what it cut off is missing there.
"""

import sys
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dtypedoctor._torch_private import schema_of
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.schema import tensors_of
from dtypedoctor.instrument.silent.look import Seen
from dtypedoctor.instrument.silent.notes import Notes
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.instrument.whereabouts import OUTSIDE, Whereabouts
from dtypedoctor.trace.records.silent import FloatToInt

LOSSY = 0.1
"""Relative error, in the Euclidean norm, from which on a cast has cut off information: whole numbers in a floating dtype
lose nothing, and the length of a sentence rounded down loses a percent."""

_INDEXING = frozenset(
    {"index", "index_put", "index_put_", "_unsafe_index", "index_select", "index_add", "index_add_", "index_copy",
     "index_copy_", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "embedding", "take", "one_hot",
     "embedding_dense_backward", "_embedding_bag", "nll_loss_forward", "repeat_interleave"}
)  # fmt: skip


@dataclass(slots=True)
class _Cast:
    fqn: str | None
    told: FloatToInt
    as_index: bool = False
    as_number: tuple[str, str | None] | None = None


@dataclass(slots=True)
class IntegerCasts:
    """Writes a :class:`FloatToInt` for each lossy cast that is used as a number and never as an index."""

    notes: Notes
    whereabouts: Whereabouts
    _casts: dict[int, _Cast] = field(default_factory=dict)

    def end(self) -> None:
        """Tells of the casts that were used as numbers only."""
        for cast in {id(cast): cast for cast in self._casts.values()}.values():
            if cast.as_number is not None and not cast.as_index:
                used_by, used_at = cast.as_number
                told = replace(cast.told, used_by=used_by, used_at=used_at)
                self.notes.once(told, (cast.fqn, told.source), cast.fqn)
        self._casts.clear()

    def saw(self, seen: Seen) -> None:
        """Notes a lossy cast, or how one is used."""
        if self._casts:
            self._note_use(seen)
        if seen.name == "aten._to_copy.default" and seen.operands and seen.results:  # vmap casts numbers by it as well
            self._note_cast(seen)

    def _note_cast(self, seen: Seen) -> None:
        source, result = seen.operands[0], seen.results[0]
        if not measurable(source) or result.is_floating_point() or result.is_complex() or result.dtype is torch.bool:
            return
        if source.numel() < 2:
            return
        error = _relative_error(source, result)
        if error is None or error < LOSSY:
            return
        place = self.whereabouts.here(sys._getframe(), "cpu")
        self._casts[seen.number(result)] = _Cast(
            fqn=place.fqn if place.root != OUTSIDE else None,
            told=FloatToInt(
                op=seen.name,
                source=place.source,
                from_=dtype_name(source),
                to=dtype_name(result),
                relative_error=error,
                elements=source.numel(),
            ),
        )

    def _note_use(self, seen: Seen) -> None:
        used = self._used_by(seen)
        if not used:
            return
        name = schema_of(seen.func).name.removeprefix("aten::")
        numbers = any(measurable(t) for t in seen.results)
        for cast in used:
            if name in _INDEXING:
                cast.as_index = True
            elif numbers and cast.as_number is None:
                cast.as_number = (seen.name, self.whereabouts.here(sys._getframe(), "cpu").source)
            elif not numbers:
                self._pass_on(seen, cast)

    def _used_by(self, seen: Seen) -> list[_Cast]:
        """The casts that made operands of an operator."""
        numbers = [seen.number(t) for t in seen.operands if not t.is_floating_point()]
        return [self._casts[number] for number in numbers if number in self._casts]

    def _pass_on(self, seen: Seen, cast: _Cast) -> None:
        """Integers made of integers say no more than these did; a truth value says something else."""
        for result in tensors_of(seen.results):
            if result.dtype is not torch.bool:
                self._casts[seen.number(result)] = cast


def _relative_error(source: Tensor, result: Tensor) -> float | None:
    """How much of ``source`` is not in ``result``; None where the source is zero or not finite."""
    exact = source.float()
    size = float(exact.norm())
    return float((exact - result.float()).norm()) / size if 0 < size < float("inf") else None
