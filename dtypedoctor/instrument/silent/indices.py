"""Whole numbers that half precision has changed on their way to being whole numbers again: labels, token ids, timesteps of an embedding."""

import sys
from functools import cache
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
from dtypedoctor.instrument.statistics import HALF, measurable
from dtypedoctor.trace.records.silent import RoundedIndices
from dtypedoctor.values import dataclass

MOST_NUMBERS = 1 << 16
"""Elements of a tensor that is followed."""
MOST_KNOWN = 64
"""Tensors that are followed at once."""

_COUNTS = "cumsum"
_MOVES = frozenset({"add", "sub", "rsub", "masked_fill", "clamp", "clamp_min"})
"""Operators by which positions are made of a count."""


@cache
def is_counted(func: Any) -> bool:
    """Whether an operator may count, or move what was counted."""
    return _base_name(func) in _MOVES | {_COUNTS}


@cache
def _base_name(func: Any) -> str:
    return str(schema_of(func).name).removeprefix("aten::").rstrip("_")


@dataclass(frozen=True, slots=True)
class Rounded:
    """Whole numbers of which half precision has changed some, by a cast or as a count.

    Attributes:
        held: the memory of what they have become.
        exact, now: what they would be, and what they are.
        op, line: of the cast or the count.
    """

    held: StorageWeakRef
    exact: Tensor
    now: Tensor
    op: str
    line: Line | None

    @property
    def source(self) -> str:
        """The line as text; empty where it is not known."""
        return "" if self.line is None else self.line.source


class IndexCheck:
    """Writes a :class:`RoundedIndices` for whole numbers that are cast to half precision, or counted in it, which changes them, and cast back.

    A GPU's memory is looked at in the steps in which it is read: to compare waits for it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._position = session.position
        self._looking = session.guard.keeping("whole numbers that are cast to half precision")
        self._known: dict[int, Rounded] = {}
        self._reads = session.readings.reads

    def saw(self, seen: Seen) -> None:
        """An operator has run inside of a module that is looked at."""
        if seen.results and str(schema_of(seen.func).name) == "aten::_to_copy":
            self.cast(seen.arguments, seen.results[0])
        elif seen.results and is_counted(seen.func):
            self.computed(seen.func, seen.arguments, seen.results[0])

    def end(self) -> None:
        """The call that was looked at is over; what was cast in it may be used later."""

    def cast(self, arguments: Arguments, result: Any) -> None:
        """A tensor was cast."""
        operand = arguments[0][0] if arguments[0] else None
        if not isinstance(operand, Tensor) or not isinstance(result, Tensor):
            return
        if result.dtype in HALF and _is_whole(operand) and self._reads(operand):
            with self._looking, self._position.mute(), torch.no_grad():
                self._rounded(operand, result, line_of(sys._getframe()))
        elif self._known and operand.dtype in HALF and _is_whole(result) and self._reads(operand):
            with self._looking, self._position.mute(), torch.no_grad():
                self._made_whole(operand, result, line_of(sys._getframe()))

    def computed(self, func: Any, arguments: Arguments, result: Any) -> None:
        """An operator has run for which :func:`is_counted` is true."""
        counts = _base_name(func) == _COUNTS
        if not (counts or self._known) or schema_of(func).is_mutable or not _is_followed(result):
            return
        if not self._reads(result):
            return
        (operand, *args), kwargs = arguments
        with self._looking, self._position.mute(), torch.no_grad():
            known = self.of(operand)
            if counts and _has_whole_numbers(operand):
                exact = (operand if known is None else known.exact).double().cumsum(args[0])
                self._remember(exact, result, str(func), line_of(sys._getframe()))
            elif known is not None and not counts:
                exact = func(known.exact.double(), *map(_in_float64, args), **kwargs)
                self._remember(exact, result, known.op, known.line)

    def of(self, tensor: Any) -> Rounded | None:
        """What is known of whole numbers that half precision has changed before they became ``tensor``."""
        known = self._known.get(memory_key(tensor.untyped_storage())) if self._known and _is_read(tensor) else None
        if known is None or known.held.expired() or known.now.numel() != tensor.numel():
            return None
        return known if torch.equal(known.now.flatten(), tensor.detach().flatten()) else None

    def _rounded(self, operand: Tensor, result: Tensor, line: Line | None) -> None:
        if operand.numel() <= MOST_NUMBERS and measurable(result):
            self._remember(operand.detach().clone(), result, "aten._to_copy.default", line)

    def _remember(self, exact: Tensor, result: Tensor, op: str, line: Line | None) -> None:
        storage = result.untyped_storage()
        self._known = {key: one for key, one in self._known.items() if not one.held.expired()}
        self._known.pop(memory_key(storage), None)
        if len(self._known) < MOST_KNOWN and not bool((result.to(exact.dtype) == exact).all()):
            held = StorageWeakRef(storage)
            self._known[memory_key(storage)] = Rounded(held, exact, result.detach().clone(), op, line)

    def _made_whole(self, operand: Tensor, result: Tensor, line: Line | None) -> None:
        known = self.of(operand)
        if known is None:
            return
        before, now = known.exact.flatten().long(), result.detach().flatten().long()
        changed = before != now
        if not bool(changed.any()):
            return
        example = int(changed.nonzero()[0, 0])
        told = RoundedIndices(
            source=known.source,
            used_at="" if line is None else line.source,
            dtype=dtype_name(known.now),
            elements=before.numel(),
            changed=int(changed.sum()),
            before=int(before[example]),
            after=int(now[example]),
            counted=_COUNTS in known.op,
        )
        self._session.once(told, known.source)


def _is_read(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and measurable(tensor)


def _is_followed(result: Any) -> bool:
    return _is_read(result) and result.dtype in HALF and result.numel() <= MOST_NUMBERS


def _in_float64(value: Any) -> Any:
    return value.detach().double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _has_whole_numbers(tensor: Any) -> bool:
    if not _is_read(tensor) or tensor.is_complex():
        return False
    return not tensor.is_floating_point() or bool((tensor == tensor.round()).all())


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
