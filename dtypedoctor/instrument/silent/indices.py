"""Whole numbers that half precision has changed on their way to being whole numbers again: labels, token ids, timesteps of an embedding."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dtypedoctor._torch_private import memory_key, schema_of
from dtypedoctor.instrument.frames import Line, line_of
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.operators import Arguments
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.silent.look import Seen
from dtypedoctor.instrument.silent.updates import HALF
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.records.silent import RoundedIndices
from dtypedoctor.values import dataclass

MOST_NUMBERS = 1 << 16
"""Elements of a tensor that is followed."""
MOST_KNOWN = 64
"""Tensors that are followed at once."""


@dataclass(frozen=True, slots=True)
class _Cast:
    """Whole numbers before a cast to half precision that changes some of them."""

    held: StorageWeakRef
    """The memory of what they were cast to."""
    exact: Tensor
    dtype: str
    line: Line | None


class IndexCheck:
    """Writes a :class:`RoundedIndices` for whole numbers that are cast to half precision, which changes them, and back.

    Only memory of the CPU is looked at: to compare would wait for a device.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._position = session.position
        self._looking = session.guard.keeping("whole numbers that are cast to half precision")
        self._known: dict[int, _Cast] = {}

    def saw(self, seen: Seen) -> None:
        """An operator has run inside of a module that is looked at."""
        if seen.results and str(schema_of(seen.func).name) == "aten::_to_copy":
            self.cast(seen.arguments, seen.results[0])

    def end(self) -> None:
        """The call that was looked at is over; what was cast in it may be used later."""

    def cast(self, arguments: Arguments, result: Any) -> None:
        """A tensor was cast."""
        operand = arguments[0][0] if arguments[0] else None
        if not isinstance(operand, Tensor) or not isinstance(result, Tensor) or operand.device.type != "cpu":
            return
        if result.dtype in HALF and _is_whole(operand):
            with self._looking, self._position.mute(), torch.no_grad():
                self._rounded(operand, result, line_of(sys._getframe()))
        elif self._known and operand.dtype in HALF and _is_whole(result):
            with self._looking, self._position.mute(), torch.no_grad():
                self._made_whole(operand, result, line_of(sys._getframe()))

    def _rounded(self, operand: Tensor, result: Tensor, line: Line | None) -> None:
        if (
            operand.numel() > MOST_NUMBERS
            or not measurable(result)
            or bool((result.to(operand.dtype) == operand).all())
        ):
            return
        self._known = {key: one for key, one in self._known.items() if not one.held.expired()}
        if len(self._known) < MOST_KNOWN:
            storage = result.untyped_storage()
            held = StorageWeakRef(storage)
            self._known[memory_key(storage)] = _Cast(held, operand.detach().clone(), dtype_name(result), line)

    def _made_whole(self, operand: Tensor, result: Tensor, line: Line | None) -> None:
        known = self._known.get(memory_key(operand.untyped_storage()))
        if known is None or known.held.expired() or known.exact.numel() != result.numel():
            return
        before, now = known.exact.flatten().long(), result.detach().flatten().long()
        changed = before != now
        if not bool(changed.any()):
            return
        example = int(changed.nonzero()[0, 0])
        source = "" if known.line is None else known.line.source
        told = RoundedIndices(
            source=source,
            used_at="" if line is None else line.source,
            dtype=known.dtype,
            elements=before.numel(),
            changed=int(changed.sum()),
            before=int(before[example]),
            after=int(now[example]),
        )
        self._session.once(told, source)


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
