"""Values that a program builds up outside of modules, a new tensor each time or in place: running sums, and averages that it assigns anew."""

import sys
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dtypedoctor._torch_private import memory_key, schema_of
from dtypedoctor.instrument.frames import Line, line_of
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.operators import Arguments
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.silent.writes import CHECKS, LOST, sampled
from dtypedoctor.instrument.statistics import HALF, measurable
from dtypedoctor.trace.records.silent import LostWrites, RoundedSum

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

SMALL = 64
"""Elements up to which a tensor is followed as a sum, from one addition to the next; a larger one as an average."""
FEWEST = 16
"""Additions from which on a sum is judged."""
WRONG = 0.05
"""Relative error of a sum from which on it is told of."""
SAMPLED = 1_024
"""Elements of an average that are followed."""
MOST_LINES = 100
"""Lines of sums that are told of."""
MOST_FOLLOWED = 2_048
"""Tensors that are followed at once: 12 MiB at most."""
ALLOWANCE, FOLLOWED, PERIOD = 8_192, 4_096, 65_536
"""Operators on averages that are all followed, 60 µs each; after them so many of so many."""

_ADDS = frozenset({"add", "add_"})
_CHANGES = frozenset({"add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv"})
_ASSIGNS = "copy_"
NOISE = 4 * torch.finfo(torch.float32).eps
ROUNDED = 2.0**-8
"""Relative changes that are rounding: of float32; and of what is added in half precision, in the average of two equal values for example."""


@cache
def _base_name(func: Any) -> str:
    return str(schema_of(func).name).removeprefix("aten::")


@dataclass(slots=True)
class _Sum:
    """A sum so far: what it is in float64, and what it was when it was last added to."""

    held: StorageWeakRef
    exact: Tensor
    now: Tensor
    added: int
    largest: float
    """Of the exact values so far: terms of both signs may cancel."""


@dataclass(slots=True)
class _Lineage:
    """A value that is computed from itself again and again, and where that begins.

    Attributes:
        begins: the operator and its line that take it first.
        start: elements as they are then.
        wide: what float32 has made of them since.
        swing: how far these have been from the start on the way.
        checks, wanted, lost, absmax, change: of the rounds since it has last moved.
    """

    begins: tuple[Any, Line | None]
    start: Tensor
    wide: Tensor
    swing: Tensor | float = 0.0
    rounds: int = 0
    checks: int = 0
    wanted: int = 0
    lost: int = 0
    absmax: float = 0.0
    change: float = 0.0

    def close(self, now: Tensor) -> None:
        """A round is over: the value is ``now``."""
        start = self.start.float()
        moved = ((self.wide - start).abs() > NOISE * start.abs() + ROUNDED * self.swing) & self.wide.isfinite()
        wanted, lost = int(moved.sum()), int((moved & (now == self.start)).sum())
        if lost < LOST * wanted:
            self.checks = self.wanted = self.lost = 0
        elif wanted:
            self.checks += 1
            self.wanted, self.lost = self.wanted + wanted, self.lost + lost
            self.absmax = max(self.absmax, float(start.abs().max()))
            self.change = max(self.change, float((self.wide - start).abs().max()))
        self.rounds += 1
        self.start, self.wide, self.swing = now, now.float(), 0.0


@dataclass(slots=True)
class _Place:
    """The lineages that begin at one line."""

    dtype: str
    known: list[_Lineage] = field(default_factory=list)


class SumCheck(Observer):
    """Writes a :class:`RoundedSum` for a sum that half precision gets wrong, and a :class:`LostWrites` for averages that stand still.

    A sum is followed in float64 from its first addition on; of an average, which is computed from itself by several operators, a thousand elements from
    one round to the next, be it a new tensor or copied back into its own (``target.copy_(tau * source + (1 - tau) * target)``). A GPU's memory is
    looked at in the steps in which it is read, and no average of which gradients are computed.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._looking = self.session.guard.keeping("sums and averages in half precision")
        self._sums: dict[int, _Sum] = {}
        self._told: dict[str, int] = {}
        """Additions of a sum when it was last told of; the next time after twice as many."""
        self._values: dict[int, tuple[StorageWeakRef, _Lineage]] = {}
        self._places: dict[Line | None, _Place] = {}
        self._computations = 0

    def follows(self, func: Any) -> bool:
        """Whether an operator may add to a sum, or be a part of the arithmetic of an average."""
        return _base_name(func) in _ADDS | _CHANGES | {_ASSIGNS}

    def ran(self, func: Any, arguments: Arguments, result: Any) -> None:
        """An operator outside of modules has returned ``result``."""
        args, kwargs = arguments
        if self.position.backward_depth or not (_is_looked_at(result) or self._goes_on_in_float32(args, result)):
            return
        if not self.session.readings.reads(result):
            return
        with self._looking, self.position.mute(), torch.no_grad():
            if result.numel() > SMALL:
                self._computed(func, args, kwargs, result, line_of(sys._getframe()))
            elif (name := _base_name(func)) in _ADDS and result.dtype in HALF:
                self._added(args, kwargs, result, line_of(sys._getframe()), in_place=name == "add_")

    def _goes_on_in_float32(self, args: tuple[Any, ...], result: Any) -> bool:
        """Whether the result is of an average in half precision, and in float32 because of the weights beside it."""
        is_wide = bool(self._values) and isinstance(result, Tensor) and result.dtype is torch.float32
        return is_wide and any(self._rounds(one) >= 0 for one in args[:2])

    def _added(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, line: Line | None, *, in_place: bool
    ) -> None:
        target, added = args[0], args[1]
        key = memory_key(result.untyped_storage())
        known = self._known_sum(target)
        amount = _wide(added) * float(kwargs.get("alpha", 1))
        if known is None or not _goes_on(known, result if in_place else target, amount if in_place else 0.0):
            exact, count, largest = result.detach().double().clone(), 1, 0.0
        else:
            exact, count, largest = known.exact + amount, known.added + 1, known.largest
        if len(self._sums) >= MOST_FOLLOWED:
            self._sums = {at: one for at, one in self._sums.items() if not one.held.expired()}
        if exact.shape != result.shape or len(self._sums) >= MOST_FOLLOWED:
            return
        now = result.detach().clone()
        largest = max(largest, float(exact.abs().max()))
        self._sums[key] = _Sum(StorageWeakRef(result.untyped_storage()), exact, now, count, largest)
        error = float((exact - now.double()).abs().max())
        if count >= FEWEST and error > WRONG * largest < float("inf"):
            self._tell_sum(line, now, count, exact, error)

    def _known_sum(self, target: Any) -> _Sum | None:
        known = self._sums.get(memory_key(target.untyped_storage())) if isinstance(target, Tensor) else None
        return None if known is None or known.held.expired() else known

    def _tell_sum(self, line: Line | None, now: Tensor, count: int, exact: Tensor, error: float) -> None:
        source = "" if line is None else line.source
        if count < 2 * self._told.get(source, 0):
            return
        worst = int((exact - now.double()).abs().argmax())
        value, right = float(now.flatten()[worst]), float(exact.flatten()[worst])
        told = RoundedSum(source=source, dtype=dtype_name(now), added=count, exact=right, value=value, error=error)
        if len(self._told) < MOST_LINES or source in self._told:
            self._told[source] = count
            self.session.emit(told)

    def _computed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor, line: Line | None
    ) -> None:
        name = _base_name(func)
        if name == _ASSIGNS:
            self._assigned(args[1], result)
        if name not in _CHANGES or result.requires_grad or not result.is_contiguous() or not self._is_turn():
            return
        place = self._place_of(func, args)
        target = args[place]
        if not isinstance(target, Tensor) or target.shape != result.shape:
            return
        if self._rounds(target) < 0 and (target.dtype is not result.dtype or target.dtype not in HALF):
            return  # of a wider dtype only what has come from half precision
        stride = -(-target.numel() // SAMPLED)
        operands = [sampled(one, target, stride) for one in args]
        if not target.is_contiguous() or any(one is None for one in operands):
            return
        if any(isinstance(one, Tensor) for one in kwargs.values()):
            return
        lineage = self._lineage_of(target, (func, line), stride)
        operands[place] = lineage.wide
        lineage.wide = func(*operands, **kwargs)
        lineage.swing = (lineage.wide - lineage.start.float()).abs().clamp_min(lineage.swing)
        self._keep(result, lineage)

    def _assigned(self, value: Any, target: Tensor) -> None:
        """What was computed from a tensor is copied into one of half precision, into itself for the most part."""
        if target.dtype in HALF and target.is_contiguous() and self._rounds(value) >= 0 and value.shape == target.shape:
            self._keep(target, self._values[memory_key(value.untyped_storage())][1])

    def _keep(self, result: Tensor, lineage: _Lineage) -> None:
        if len(self._values) >= MOST_FOLLOWED:
            self._values = {at: one for at, one in self._values.items() if not one[0].expired()}
        if len(self._values) < MOST_FOLLOWED:
            storage = result.untyped_storage()
            self._values[memory_key(storage)] = (StorageWeakRef(storage), lineage)

    def _is_turn(self) -> bool:
        """Whether averages are followed now; where it begins anew, what was known is of rounds that were not all seen."""
        self._computations += 1
        if self._computations <= ALLOWANCE or self._computations % PERIOD < FOLLOWED:
            return True
        self._values.clear()
        return False

    def _place_of(self, func: Any, args: tuple[Any, ...]) -> int:
        """The operand that is built up: the first, or of two that may change places the one that has been for longer."""
        if _base_name(func) not in ("add", "mul"):
            return 0
        rounds = [self._rounds(one) for one in args[:2]]
        return int(len(rounds) == 2 and rounds[1] > rounds[0])

    def _rounds(self, value: Any) -> int:
        """How often a value has been computed from itself; -1 where it is not followed."""
        held, lineage = (
            self._values.get(memory_key(value.untyped_storage()), (None, None))
            if isinstance(value, Tensor)
            else (None, None)
        )
        return -1 if held is None or lineage is None or held.expired() else lineage.rounds

    def _lineage_of(self, target: Tensor, begins: tuple[Any, Line | None], stride: int) -> _Lineage:
        """What ``target`` has come from; a new lineage where that is not known."""
        now = target.detach().reshape(-1)[::stride].clone()
        held, lineage = self._values.get(memory_key(target.untyped_storage()), (None, None))
        if held is None or lineage is None or held.expired() or lineage.start.shape != now.shape:
            return _Lineage(begins, now, now.float())
        if lineage.begins == begins:
            self._close(lineage, now, dtype_name(target))
        return lineage

    def _close(self, lineage: _Lineage, now: Tensor, dtype: str) -> None:
        lineage.close(now)
        place = self._places.setdefault(lineage.begins[1], _Place(dtype))
        if lineage.rounds == CHECKS and len(place.known) < MOST_FOLLOWED:
            place.known.append(lineage)

    def stop(self) -> None:
        """The program is over: tells of the lines whose averages stand still."""
        for line, place in self._places.items():
            stalled = [one for one in place.known if one.checks >= CHECKS]
            if stalled and 2 * len(stalled) >= len(place.known):
                worst = max(stalled, key=lambda one: one.wanted)
                self.session.emit(
                    LostWrites(
                        source="" if line is None else line.source,
                        dtype=place.dtype,
                        tensors=len(stalled),
                        compared=len(place.known),
                        checks=worst.checks,
                        wanted=sum(one.wanted for one in stalled),
                        lost=sum(one.lost for one in stalled),
                        absmax=worst.absmax,
                        change=worst.change,
                        in_place=False,
                    )
                )


def _is_looked_at(result: Any) -> bool:
    """Whether it is a tensor in half precision."""
    if not isinstance(result, Tensor) or result.dtype not in HALF:
        return False
    return measurable(result) and result.numel() > 0


def _wide(value: Any) -> Any:
    """A number or a tensor in float64."""
    return value.detach().double() if isinstance(value, Tensor) else float(value)


def _goes_on(known: _Sum, held: Tensor, amount: Any) -> bool:
    """Whether ``held`` is the sum as it was left, with ``amount`` added in place: nothing else has been written to it."""
    if known.now.shape != held.shape:
        return False
    return bool(((known.now.double() + amount).to(held.dtype) == held).all())
