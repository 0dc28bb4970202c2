"""State in half precision that does not go where the same operators take it in float64.

State is memory that is there before something changes it: parameters, buffers, what an optimizer keeps, an average of weights, a count, a gradient that is
added up. Beside a thousand elements of it stand float64 values, which begin as what it is and to which the same operators are applied: in place, with
``out=``, on lists, in a fused step, or over several operators to what is copied back or takes its place. What the program has moved it by is
compared with what it would have moved:

* nearly all elements that move in float64 stand still: **lost** updates, averages, merges;
* some move many times as far: what they are divided by has **vanished**;
* it is further off than as many random roundings would leave it: a **sum**, or a value that is computed from itself;
* it comes back to where it began, and in half precision it does not: what was added is **not restored**.

Nothing is lost where another value has the same error with the other sign (Kahan's sum), where state is a copy of wider state, or is rounded at random:
random numbers, bits and wider state begin anew as what they are.

Only operators that treat each element by itself are followed, since for them a few elements can stand for all. Optimizers are looked at from one end of
their step to the other, all else from where an operator at a line meets the same state again.
"""

import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from dtypedoctor._torch_private import memory_key, register_own, schema_of
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.instrument.budget import WINDOW, is_checked, is_in_window
from dtypedoctor.instrument.frames import Line, line_of
from dtypedoctor.instrument.gradients import leaves_of
from dtypedoctor.instrument.lifted import Lifted
from dtypedoctor.instrument.module_tree import parameters_in
from dtypedoctor.instrument.naming import dtype_name, short_name
from dtypedoctor.instrument.operators import (
    Arguments,
    Uncollected,
    in_wider,
    names_written,
    tensors_of,
    uncollected,
    writes_besides,
    written,
)
from dtypedoctor.instrument.silent.observer import Observer, parameters_of
from dtypedoctor.instrument.silent.shadows import Shadows, digits_lost, has_wide_form
from dtypedoctor.instrument.statistics import HALF, measurable
from dtypedoctor.trace.records.silent import (
    LostWrites,
    Overshoots,
    OvershotParameter,
    RoundedSum,
    RoundedUse,
    StalledParameter,
    Updates,
)

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

SAMPLED = 1024
"""Elements of a tensor that are followed."""
LARGEST_WHOLE = 1 << 16
"""Elements up to which a tensor that is not contiguous, or is broadcast, is copied as a whole."""
MOST = 4_096
"""Tensors beside which float64 values are kept, 50 MiB at most."""
ALLOWANCE, FOLLOWED, PERIOD = 16_384, 4_096, 65_536
"""Operators outside of steps that are all followed, 0.1 ms each; after them so many of so many."""
ROUNDS, FEWEST, MOST_ANCESTORS = 3, 16, 4
"""Rounds without a movement from which on state stands still, those from which on it has drifted, and states that a value is known to come from."""
LOST, MOSTLY, NOISY = 0.95, 0.5, 0.25
"""Shares of the elements which move in float64 that have to stay; in a step of an optimizer, to be told of, and of what state moves by as a whole; and of the energy of a merge that has to be rounding: an error half as large as what is merged."""
LASTING, MEASURED = 0.1, 64
"""Share of its size by which a statement has to move state in all to be told of where it is a part of torch's own steps, or of none; calls of one that are measured."""
SHARE = 0.05
"""Share of what a line changes that has to stand still for it to be told of: gains near 1 beside matrices that move are a part of a training, too."""
EACH, MORE = 4, 8
"""Rounds from one comparison to the next; later one in so many of all, so that a loop of thousands is compared some dozens of times."""
NOISE, ON_THE_WAY = torch.finfo(torch.float32).eps / 2, 2.0**-8
"""Relative changes that are no movement: those that float32 would round away, too; and beside how far a value went before it came back."""
BACK, FURTHER, RETURNS = 2.0**-6, 4, 2
"""What is left in float64 of the way there and back; how much further from the start half precision has to be; and how often."""
CANCELS, SMALLER = 0.25, 2.0**-4
"""What two errors of opposite sign leave of one another where one keeps what the other has lost; and how large it is beside the other at most."""
TOO_FAR, MANY_TOO_FAR, ENOUGH_TOO_FAR = 16.0, 0.01, 8
"""Times that an element moves further than in float64, which no rounding explains; share of the elements that do, and how many at least."""
DEVIATIONS = 4
"""Standard deviations of as many random roundings as there were, beyond which a drift is none of them; that of one is a quarter of the dtype's epsilon."""
SMALL = 64
"""Elements up to which what is added to is a sum, and not an average or weights."""
RECURRENT = 1 << 10
"""Elements up to which values are followed that gradients are computed of."""
BACKWARDS, GRADIENTS = 3, 4
"""Optimizer steps in which gradients of many backward passes are followed, and how many of them."""
AT_ONCE = 1 << 20
"""Elements that are compared together: a dozen of copies in float64 are made of them."""
MOST_TOLD = 40
_READING = frozenset({"index", "gather", "index_select"})
_FILLING = frozenset({"fill_", "zero_"})
"""Operators that write without a look at what was there."""
_ADDING = frozenset({"add_", "sub_", "addmm_", "addbmm_", "baddbmm_", "addr_"})
"""Operators by which something is merged into weights."""

_At = tuple[Any, Line | None]
"""An operator at a line."""
_Key = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]
"""Where a tensor lies, and how it is read."""
_Pair = tuple[Tensor, Tensor]
"""Elements as they are, and what they would be in float64."""
_Moment = tuple[int, int, str]
"""A step, a call and a phase."""
_START: _Moment = (1, 0, "forward")


@dataclass(slots=True, eq=False)
class _State(Uncollected):
    """What is known of state.

    Attributes:
        home: where it lies now.
        last: elements as they are, and in float64; ``start`` where the round began, ``first`` where it was met, from where on errors count.
        shift: how far it was off by then.
        elements: of the whole.
        in_step: steps of the optimizer in which it was met.
        met: moment in which it was met last: at the end of a program there is no step of the present number.
        since: moment in which the round began from which on it stands still; ``apart_since`` in which a sum was met that is another one than in float64.
        is_parameter: whether it is compared where that step ends.
        ops: operators that have read it or written to it since the round began.
        line, end: that changed it in the last round, first and last; ``is_new`` where none has yet in this round.
        parents: other state that it was computed from.
        source: memory of float32 values that were copied into it.
        turns: rounds that are over; ``unseen_after`` of these something has changed it that was not seen, and it began anew (0 for never);
            ``compared_at`` when it was compared last, ``judged`` how often float64 had moved it then.
        still: rounds since it has last moved; ``wanted`` and ``lost`` elements in these, ``absmax`` and ``change`` the largest and their largest movement,
            ``net`` how far they go in float64 in all, beside themselves and to one side.
        is_off: whether float64 is further away by now than one rounding, in most of what moves.
        step, gaps: in which it was met last, and how often calls had gone by by then that were not looked at; ``number`` of its optimizer's step.
        peak, way: largest magnitude, and how far each element has been from where the round began, in float64.
        base, went: what it was in float64 when it was compared first, and how far it has been from there; ``is_rest`` where nothing of it is left there.
        adds, counts: whether nothing but additions change it, and all that it has been are whole numbers.
        sums: how often a tensor of its size was added or taken away.
        off: the largest error.
        returns: how often it has come back to where it began, and what was not restored then: elements and the largest difference.
    """

    home: _Key
    elements: int
    last: _Pair
    shift: Tensor
    in_step: "_Steps | None" = None
    is_parameter: bool = False
    first: _Pair = field(init=False)
    start: _Pair = field(init=False)
    ops: set[_At] = field(default_factory=set)
    line: Line | None = None
    end: Line | None = None
    is_new: bool = True
    parents: set[int] = field(default_factory=set)
    source: StorageWeakRef | None = None
    in_place: bool = False
    turns: int = 0
    unseen_after: int = 0
    compared_at: int = 0
    judged: int = 0
    still: int = 0
    wanted: int = 0
    lost: int = 0
    absmax: float = 0.0
    change: float = 0.0
    net: float = 0.0
    peak: float = 0.0
    way: Tensor | None = None
    base: Tensor | None = None
    went: float = 0.0
    is_rest: bool = False
    adds: bool = True
    counts: bool = True
    is_off: bool = False
    step: int = 0
    number: int = 0
    met: _Moment = _START
    began: _Moment = _START
    since: _Moment = _START
    apart_since: _Moment | None = None
    gaps: int = 0
    sums: int = 0
    off: float = 0.0
    returns: int = 0
    not_restored: tuple[int, float] = (0, 0.0)

    @classmethod
    def of(
        cls, tensor: Tensor, now: Tensor, exact: Tensor, in_step: "_Steps | None" = None, *, is_parameter: bool = False
    ) -> "_State":
        """The state that a tensor is."""
        return cls(_key(tensor), tensor.numel(), (now, now.double()), exact - now.double(), in_step, is_parameter)

    def __post_init__(self) -> None:
        self.first = self.start = self.last

    @property
    def dtype(self) -> torch.dtype:
        """Of the state."""
        return self.last[0].dtype

    def becomes(self, now: Tensor, exact: Tensor) -> None:
        """It is something else now."""
        self.last = (now, exact - self.shift)

    def begin_round(self, at: _At | None = None) -> None:
        """A round begins with what is there."""
        self.start, self.way, self.is_new, self.compared_at = self.last, None, True, self.turns
        self.began = self.met
        self.ops = set() if at is None else {at}

    def overwritten(self, now: Tensor) -> None:
        """Something that was not computed from it takes its place: begins anew."""
        self.first = self.last = (now, now.double())
        self.shift = torch.zeros_like(self.last[1])
        self.turns = self.unseen_after = self.judged = self.still = self.wanted = self.lost = self.returns = 0
        self.peak, self.went, self.base, self.adds, self.counts = 0.0, 0.0, None, True, True
        self.apart_since = None
        self.begin_round()

    def unseen(self, now: Tensor, at: _At) -> None:
        """Something has changed it that was not seen: it goes on from there."""
        self.unseen_after = self.turns
        self.first = self.last = (now, now.double())
        self.shift = torch.zeros_like(self.last[1])
        self.begin_round(at)

    def compared(self, numbers: Sequence[float], least: float) -> None:
        """Takes note of what :func:`_differences` says of a round."""
        (wanted, lost, absmax, change, self.off, peak, went, left_over, far, others, most) = numbers[:11]
        is_short, wrong, apart_once, whole, gone_far, stuck, net = numbers[11:]
        rounds, elements = self.turns - self.compared_at, self.last[0].numel()
        self.peak, self.went, self.is_rest = max(self.peak, peak), max(self.went, went), peak <= NOISE * self.peak
        self.counts = self.counts and bool(whole)
        self.judged += rounds if wanted else 0
        has_settled = not wanted and not apart_once  # as near to where float64 stands still as the dtype allows
        if has_settled or (wanted and lost < least * wanted and not is_short):
            self.still = self.wanted = self.lost = 0
            self.is_off = False
            self.absmax = self.change = self.net = 0.0
        elif wanted:
            self.net += net
            self.since = self.since if self.still else self.began
            self.still, self.wanted, self.lost = self.still + rounds, self.wanted + int(wanted), self.lost + int(lost)
            self.absmax, self.change = max(self.absmax, absmax), max(self.change, change)
            self.is_off |= wrong >= MOSTLY * wanted  # also where what follows was not seen, and begins anew
        # A few elements may move in each round while the others never have
        is_stuck = self.turns >= FEWEST and stuck >= MOSTLY * gone_far and gone_far >= MOSTLY * elements
        if is_stuck and not self.in_step:
            self.since = self.since if self.still else self.began
            self.still, self.wanted, self.lost, self.is_off = self.turns, int(gone_far), int(stuck), True
            self.absmax, self.change = absmax, left_over
        if left_over < BACK * far and self.sums > 1 and self.off < self.peak:
            self.returns, self.not_restored = self.returns + rounds, (int(others), most)

    @property
    def stands_still(self) -> bool:
        """Whether it has not moved for long: where it has moved before, what float64 makes, rounded once, has to be another value by now."""
        if self.in_step or self.turns <= max(FEWEST, self.still + ROUNDS):
            return self.still >= ROUNDS
        return self.is_off and self.still >= 2 * EACH

    @property
    def is_sum(self) -> bool:
        """Whether it adds up a few numbers, and is neither weights nor an average."""
        return self.adds and self.elements <= SMALL and not self.in_step

    def has_drifted(self) -> bool:
        """Whether it is further off than as many random roundings leave it; a count may not be off at all. What a sum began with is not what it adds up.

        Of a rest, such as what Kahan's sum keeps, float64 leaves nothing: it is the error itself.
        """
        dtype = DTYPES[short_name(self.dtype)]
        random = DEVIATIONS * dtype.epsilon / 4 * math.sqrt(self.turns) * self.peak
        lost = digits_lost(dtype.name) * (self.went if self.is_sum else self.peak)
        least = 0.0 if self.counts and self.adds else max(lost, random)
        is_enough = self.turns >= FEWEST or least == 0.0
        return least < self.off <= self.peak < math.inf and is_enough and not self.is_rest


def _compare(states: Iterable[_State], least: float = LOST) -> None:
    """Compares where a round has led to with where it should have, of many at once: a device takes as long for one as for hundreds.

    State stands still where at least such a share of what should move does; or where half of the way is lost, by more than roundings of as many elements
    to both sides would make, and it is further off than as many of each element would leave it; or where most elements have gone away from where they
    began, by two roundings and more, and most of these have never moved.
    """
    alike: defaultdict[Any, list[_State]] = defaultdict(list)
    for state in states:
        state.base = state.last[1] if state.base is None else state.base
        form = [(one.dtype, one.device, one.shape) for one in (*state.last, *state.start, *state.first, state.base)]
        alike[tuple(form)].append(state)
    for same in alike.values():
        at_once = max(1, AT_ONCE // max(1, same[0].last[0].numel()))
        for some in (same[k : k + at_once] for k in range(0, len(same), at_once)):
            for state, numbers in zip(some, _differences(some).tolist(), strict=True):
                state.compared(numbers, least)


def _differences(states: Sequence[_State]) -> Tensor:
    """What :meth:`_State.compared` takes note of: a row of numbers for each of some states of one form."""

    def each(of: Callable[[_State], Any]) -> Tensor:
        return torch.stack([of(state).reshape(-1) for state in states])

    now, exact, base = each(lambda one: one.last[0]), each(lambda one: one.last[1]), each(lambda one: one.base)
    before, start = each(lambda one: one.start[0]), each(lambda one: one.start[1])
    first, began = each(lambda one: one.first[0]), each(lambda one: one.first[1])
    turns = exact.new_tensor([[one.turns, one.turns - one.compared_at] for one in states])[:, None]
    size, moved, off = before.double().abs(), exact - start, (now.double() - exact).abs()
    ways = [torch.zeros_like(one.last[1]) if one.way is None else one.way for one in states]
    way = torch.maximum(moved.abs(), torch.stack([one.reshape(-1) for one in ways]))
    moves = (moved.abs() > NOISE * size + ON_THE_WAY * way) & exact.isfinite()
    moved = torch.where(moves, moved, 0.0)
    short = moved * (moved - (now.double() - before.double())).nan_to_num(0.0, 0.0, 0.0)
    info = torch.finfo(now.dtype)
    spacing = info.eps * exact.abs().clamp(min=info.tiny)
    is_off = off > spacing / 2
    far_off = torch.where(moves, (off / spacing).square() - turns[..., 0] / 4, 0.0)
    left, apart = (exact - began).abs(), (now.double() - first.double()).abs()
    gone = left > 2 * spacing
    is_whole = (exact == exact.round()) & (start == start.round()) & (moved.abs() <= turns[..., 1] * 2 / info.eps)
    numbers = (
        moves.sum(1),
        (moves & (now == before)).sum(1),
        size.amax(1),
        moved.abs().amax(1),
        off.nan_to_num(0.0, 0.0, 0.0).amax(1),
        exact.abs().amax(1),
        (exact - base).abs().amax(1),
        left.amax(1),
        way.amax(1),
        (apart > FURTHER * left).sum(1),
        apart.amax(1),
        (short.sum(1) > torch.maximum(MOSTLY * moved.square().sum(1), DEVIATIONS * short.norm(dim=1)))
        & (far_off.sum(1) > 0),
        (moves & is_off).sum(1),
        is_off.sum(1),
        is_whole.all(1),
        gone.sum(1),
        (gone & (now == first)).sum(1),
        (moved * exact.sign()).sum(1) / size.sum(1).clamp(min=info.tiny),
    )
    return torch.stack([number.double() for number in numbers], 1)


class _From(NamedTuple):
    """State that a value is computed from: where that began, None where the value is the state; whether by additions only; and what it was then."""

    state: _State
    began: _At | None = None
    adds: bool = True
    before: _Pair | None = None


@dataclass(slots=True)
class _Value(Uncollected):
    """What is in memory, and what it would be in float64, at the elements that are followed."""

    held: StorageWeakRef
    now: Tensor
    exact: Tensor
    come_from: tuple[_From, ...] = ()
    line: Line | None = None
    made: _Moment = _START
    met_by: set[_At] = field(default_factory=set)

    def known(self, tensor: Tensor) -> Tensor:
        """The float64 values of the tensor that lies here, unless somebody has written to it unseen; without a wait for the device."""
        now = _elements(tensor, tensor.shape)
        return torch.where((now == self.now).all(), self.exact, now.double())


class _Operand(NamedTuple):
    """An operand, its number in a list, the shape that it is broadcast to, and its elements there as they are and in float64."""

    number: int
    tensor: Tensor
    key: _Key
    shape: torch.Size
    now: Tensor
    exact: Tensor
    value: _Value | None

    @property
    def is_whole(self) -> bool:
        """Whether it is as large as the result."""
        return self.tensor.shape == self.shape

    @property
    def whole(self) -> Tensor:
        """All elements, with the float64 values of those that are followed."""
        if not self.tensor.is_floating_point():
            return self.tensor
        values = self.tensor.detach().double().contiguous().clone()
        values.view(-1)[:: _stride(self.shape)] = self.exact.reshape(-1)
        return values


class _Call(NamedTuple):
    """An operator that is about to run, and what it makes in float64."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: Line | None
    operands: Sequence[_Operand]
    changed: Sequence[Tensor]
    exact: Sequence[Tensor]

    @property
    def adds(self) -> bool:
        """Whether it only adds."""
        name = _name(self.func).removeprefix("_foreach_").rstrip("_")
        return name in ("add", "index_add", "scatter_add") and "alpha" not in self.kwargs

    def adds_to(self, state: "_State") -> bool:
        """Whether it only adds to ``state``, and nothing that is computed from it: an average, which takes a part of itself away, is no sum."""
        of_it = [one for one in self.operands if one.value and any(a.state is state for a in one.value.come_from)]
        return self.adds and len(of_it) < 2

    @property
    def copies_half(self) -> bool:
        """Whether it copies a tensor of half precision, element by element."""
        if _name(self.func) != "copy_" or len(self.operands) != 2:
            return False
        return self.operands[1].is_whole and self.operands[1].now.dtype in HALF

    def part(self, number: int) -> "_Call":
        """What belongs to one of its results: of lists the operands at its position."""
        first = self.args[0] if self.args else None
        if not isinstance(first, (list, tuple)):
            return self
        number %= len(first)  # a fused step writes to several lists
        return self._replace(operands=[one for one in self.operands if one.number == number])


@dataclass(slots=True)
class _Parameter:
    """A parameter of an optimizer, over the steps that were compared, in elements.

    Attributes:
        first: before the first step; ``moves`` which of them move in float64 in one of the steps so far; ``signs`` sums of the signs of gradients.
    """

    name: str
    dtype: str
    elements: int
    first: Tensor
    moves: Tensor
    signs: Tensor
    before: tuple[Tensor, Tensor]
    checks: int = 0
    wanted: int = 0
    lost: int = 0
    asked: int = 0
    still: int = 0
    steady: float = 0.0
    absmax: float = 0.0
    update: float = 0.0
    is_finite: bool = False
    is_kept: bool = False

    def counts(self, now: Tensor, exact: Tensor) -> Tensor:
        """What :meth:`add` adds and :class:`OvershotParameter` tells, on the device."""
        before, start = self.before
        update, moved = exact - start, now.double() - before.double()
        size = before.double().abs()
        wanted = (update.abs() > NOISE * size) & update.isfinite()
        self.moves |= wanted
        asked = self.moves & now.isfinite()  # NaN is another failure than weights that stand still
        info = torch.finfo(before.dtype)
        far = moved.abs() > TOO_FAR * update.abs() + 2 * (info.eps * size + info.tiny)
        far &= moved.isfinite().all()  # what is not finite is a finding of its own
        numbers = (
            wanted.sum(),
            (wanted & now.eq(before)).sum(),
            torch.where(size.isfinite(), size, 0.0).max(),
            torch.where(wanted, update.abs(), 0.0).max(),
            update.isfinite().any(),
            asked.sum(),
            (asked & now.eq(self.first)).sum(),
            self.signs.abs().mean() / max(self.checks, 1),
            far.sum(),
            torch.where(far, moved.abs(), 0.0).max(),
            torch.where(far, update.abs(), 0.0).max(),
        )
        return torch.stack([number.double() for number in numbers])

    def add(self, counts: Sequence[float]) -> None:
        """Adds what a step has come to."""
        wanted, lost, absmax, update, finite, asked, still, self.steady = counts
        self.wanted, self.lost = self.wanted + int(wanted), self.lost + int(lost)
        self.asked, self.still = int(asked), int(still)
        self.absmax, self.update = max(self.absmax, absmax), max(self.update, update)
        self.is_finite |= finite > 0


@dataclass(slots=True)
class _Statement:
    """What an operator at a line does to state beside all else that changes it: a decay, a constraint.

    Attributes:
        is_torchs: whether it is a part of the step of an optimizer of torch.
        calls: how often, of which so many ``rounds`` were measured.
        signs: sums of the signs of the movements.
        way: how far it moves the state in all, beside its size.
    """

    state: _State
    line: Line
    is_torchs: bool
    signs: Tensor
    calls: int = 0
    rounds: int = 0
    wanted: int = 0
    lost: int = 0
    absmax: float = 0.0
    change: float = 0.0
    way: float = 0.0

    def add(self, before: _Pair, after: _Pair) -> None:
        """Adds one round."""
        moved, size = after[1] - before[1], before[0].double().abs()
        moves = (moved.abs() > NOISE * size) & moved.isfinite()
        self.rounds, self.wanted = self.rounds + 1, self.wanted + int(moves.sum())
        self.lost += int((moves & (after[0] == before[0])).sum())
        self.signs += torch.where(moves, moved.sign(), 0.0)
        self.absmax = max(self.absmax, float(size.max()))
        self.way += float(
            torch.where(moves, moved.abs(), 0.0).sum() / size.sum().clamp(min=torch.finfo(size.dtype).tiny)
        )
        self.change = max(self.change, float(torch.where(moves, moved.abs(), 0.0).max()))

    @property
    def is_without_effect(self) -> bool:
        """Whether nearly nothing is left of it, although it moves most elements, each to the same side each time: what only takes back a step does not.

        Beside a step each counts; as a part of torch's own, or of none, it has to come to something.
        """
        most, steady, steps = (
            MOSTLY * self.rounds * self.signs.numel(),
            float(self.signs.abs().sum()),
            self.state.in_step,
        )
        if self.rounds < ROUNDS or self.wanted < most or min(self.lost, steady) < LOST * self.wanted:
            return False
        if steps is None or self.is_torchs:
            return self.way * (steps.number if steps else self.calls) >= LASTING * self.rounds
        return True


@dataclass(slots=True)
class _Steps:
    """The steps of an optimizer.

    Attributes:
        of: the name of its class.
        first: number of its first one.
        last: number of the last one that could be looked at.
        is_half: whether it has parameters in half precision.
        is_torchs: whether its class is one of torch's.
        has_half: whether half precision takes part in its steps.
    """

    of: str
    first: int
    is_half: bool
    is_torchs: bool
    parameters: dict[tuple[int, str], _Parameter] = field(default_factory=dict)
    number: int = 0
    last: int = 0
    has_half: bool = False
    is_told: bool = False
    overshot: bool = False


class StateCheck(Observer):
    """Writes a :class:`LostWrites`, :class:`Updates`, :class:`Overshoots`, :class:`RoundedSum` or :class:`RoundedUse` of state that does not go where float64 takes it."""

    priority = 20

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._looking = self.session.guard.keeping("state in half precision")
        self._values: OrderedDict[_Key, _Value] = OrderedDict()
        self._operators = 0
        self._steps: WeakKeyDictionary[Optimizer, _Steps] = WeakKeyDictionary()
        self._stepping: list[tuple[Tensor, _Parameter]] | None = None
        self._optimizer: _Steps | None = None
        self._followed: dict[int, _State] = {}
        """State that has been through enough rounds to be judged."""
        self._merges: list[_State] = []
        self._added_to: set[_State] = set()
        """State to which something was added before the next outermost call, which may show that it is a parameter."""
        self._statements: dict[tuple[int, Any, Line], _Statement] = {}
        self._results: OrderedDict[_Key, _Value] = OrderedDict()
        """What is computed from state, and may become a parameter."""
        self._told: dict[Line | None, int] = {}
        self._last_call = self._gaps = 0
        self._accumulated: dict[_Key, Any] = {}
        """Hooks on the nodes that add to gradients."""

    @property
    def is_stepping(self) -> bool:
        """Whether the operators of the optimizer's step that runs are to be shown."""
        return self._stepping is not None

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        """An operator is about to run: what is to be handed to :meth:`after`; None where no state takes part in it."""
        by_element = _is_by_element(func)
        if not (by_element or _is_followed_whole(func)):
            return None
        with self._looking:
            tensors, changed = tensors_of((args, kwargs)), written(func, (args, kwargs))
            if not by_element and sum(tensor.numel() for tensor in tensors) > LARGEST_WHOLE:
                return None
            if not tensors or not self._takes_part(kwargs, tensors, changed):
                return None
        with self._looking, self.position.aside():
            return self._call(func, (args, kwargs), changed, line_of(sys._getframe()))
        return None

    def after(self, call: _Call, result: Any) -> None:
        """It has run."""
        results = call.changed or tensors_of(result)
        if len(results) != len(call.exact):
            return
        with self._looking, self.position.aside():
            for number, (real, exact) in enumerate(zip(results, call.exact, strict=True)):
                if measurable(real) and exact.numel() == -(-real.numel() // _stride(real.shape)):
                    self._keep(call.part(number), real, exact.reshape(-1))

    def _takes_part(self, kwargs: dict[str, Any], tensors: list[Tensor], changed: list[Tensor]) -> bool:
        half = any(tensor.dtype in HALF for tensor in tensors) or kwargs.get("dtype") in HALF
        self.session.is_in_half |= half
        if not half and (not self._values or self._values.keys().isdisjoint(map(_key, tensors))):
            return False
        position, target = self.position, changed[0] if changed else tensors[0]
        if not all(map(_is_readable, tensors)):
            return False
        if position.backward_depth and (not changed or _key(target) in self._accumulated):
            return False
        differentiated = not changed and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if differentiated and target.numel() > RECURRENT:
            return False
        if self._optimizer is not None:
            self._optimizer.has_half = True
            return True
        return self._affords(tensors, changed)

    def _affords(self, tensors: list[Tensor], changed: list[Tensor]) -> bool:
        """Whether it is an operator's turn: all of the first ones, then some; on a GPU what changes no half precision only where it is read anyway."""
        self._operators += 1
        is_turn = self._operators <= ALLOWANCE or self._operators % PERIOD < FOLLOWED
        readings = self.session.readings
        return is_turn and (any(tensor.dtype in HALF for tensor in changed) or all(map(readings.may_read, tensors)))

    def _call(self, func: Any, arguments: Arguments, changed: list[Tensor], line: Line | None) -> _Call:
        """What an operator makes in float64, which it meets state by."""
        by_element = _is_by_element(func)
        operands = [self._operand(*pair) for pair in (_broadcast if by_element else _as_they_are)(*arguments)]
        met = [self._meet(one, one.value, (func, line)) for one in operands if one.value is not None and one.is_whole]
        self._rounds_are_over(list(dict.fromkeys(filter(None, met))), (func, line))
        if by_element:
            stand_ins = {id(one.tensor): one.exact.clone() for one in operands}
            exact = in_wider(func, arguments, torch.float64, (*HALF, torch.float32), stand_ins)
        else:
            exact = _elements_of(func, arguments, {id(one.tensor): one.whole for one in operands}, changed)
        return _Call(func, *arguments, line, operands, changed, exact)

    def lifted(self, made: Lifted) -> None:
        """A number of Python's has been rounded to half precision: state that is computed with it would be another one with the number."""
        if made.tensor.dtype in HALF and made.tensor.numel() == 1:
            with self._looking, self.position.aside():
                now = _elements(made.tensor, made.tensor.shape).clone()
                number = _Value(StorageWeakRef(made.tensor.untyped_storage()), now, made.exact.reshape(1))
                self._store(_key(made.tensor), number)

    def _operand(self, number: int, tensor: Tensor, shape: torch.Size) -> _Operand:
        """An operand with what it is and would be; half precision that is not known is state that begins here."""
        key, now = _key(tensor), _elements(tensor, shape).clone()
        if not tensor.is_floating_point():
            return _Operand(number, tensor, key, shape, now, now, None)
        value, exact = self._values.get(key), now.double()
        if value is not None and value.held.expired():
            del self._values[key]
            value = None
        if value is not None:
            now = self._in_its_precision(tensor, now, value)
            exact = _broadcast_to(shape, value.known(tensor), tensor, exact)
        elif tensor.dtype in HALF and tensor.shape == shape:
            value = self._begin(tensor, now)
        if now.numel() == 1 < shape.numel() and tensor.dtype not in HALF:
            exact = now  # a fused kernel takes its count of steps in float32 only
        return _Operand(number, tensor, key, shape, now, exact, value)

    def _in_its_precision(self, tensor: Tensor, now: Tensor, value: _Value) -> Tensor:
        """Elements of wider memory in the half precision that was copied into it, as long as they are what was copied."""
        is_narrow = tensor.dtype not in HALF and value.now.dtype in HALF and value.now.shape == now.shape
        if is_narrow and self.session.readings.affords(tensor) and torch.equal(value.now.to(now.dtype), now):
            return value.now
        return now

    def _begin(self, tensor: Tensor, now: Tensor, *, is_parameter: bool = False) -> _Value:
        """Half precision is met that nothing is known of."""
        value = _Value(StorageWeakRef(tensor.untyped_storage()), now, now.double())
        state = _State.of(tensor, now, value.exact, self._optimizer, is_parameter=is_parameter)
        value.come_from = (_From(state),)
        self._store(_key(tensor), value)
        return value

    def _store(self, key: _Key, value: _Value) -> None:
        if len(self._values) >= MOST and key not in self._values:
            for gone in [at for at, known in self._values.items() if known.held.expired()]:
                del self._values[gone]
            while len(self._values) > MOST // 2:
                self._values.popitem(last=False)
        self._values[key] = value

    def _meet(self, operand: _Operand, value: _Value, at: _At) -> _State | None:
        """An operator reads state or writes to it: by one that has done so before a round is over. Returns what is to be compared then."""
        is_first = not value.come_from and operand.tensor.dtype in HALF
        # what is met again is no step on the way of other state, but state by itself: a copy, weights in float32
        if is_first or (
            at in value.met_by and not (_is_home(value) or any(at == one.began for one in value.come_from))
        ):
            state = _State.of(operand.tensor, operand.now, operand.exact, self._optimizer)
            value.come_from = (_From(state),)
        value.met_by.add(at)
        for state, began, adds, _ in value.come_from:
            if state.is_parameter or (state.in_step and state.number == state.in_step.number):
                continue  # within a step one is ahead of another that keeps what it loses
            # on its way in float32 it is not back, though the same cast at the same line meets it: ``(p.float() - step).to(p.dtype)``
            is_back = operand.now.dtype is state.dtype and not state.in_place
            if at in state.ops if began is None else at == began and is_back:
                if self._goes_on_elsewhere(state, operand, at):
                    return None
                state.becomes(operand.now, operand.exact)
                self._note_apart(state, value.made)
                if began is not None:  # it is computed anew each time, and lies elsewhere now
                    state.home, state.line, state.adds = operand.key, value.line or began[1], state.adds and adds
                    state.is_new = False
                    state.parents |= {id(one.state) for one in value.come_from}
                    value.come_from = (_From(state),)
                    self._look_at_each_call()
                return state if self._round_is_over(state, operand, at) else None
            if began is None:
                if not state.ops:
                    state.met = self.position.moment
                    state.becomes(operand.now, operand.exact)
                    state.begin_round()
                state.ops.add(at)
        return None

    def _goes_on_elsewhere(self, state: _State, operand: _Operand, at: _At) -> bool:
        """Whether state has changed in steps, or between calls, that were not seen; then what was seen of it before is compared."""
        before, state.step, state.met = state.step, self.position.step, self.position.moment
        gaps, state.gaps = state.gaps, self._gaps
        last, state.number = state.number, state.in_step.number if state.in_step else 0
        is_next = state.step <= before + 1 and state.number <= last + 1 and gaps == self._gaps
        if not before or is_next or not self.session.readings.affords(operand.tensor):
            return False
        if torch.equal(operand.now, state.last[0]):
            return False
        if not state.is_new and id(state) in self._followed:
            self._end(state)
        state.unseen(operand.now, at)
        return True

    def _round_is_over(self, state: _State, operand: _Operand, at: _At) -> bool:
        """Whether state is to be compared at the end of this round."""
        state.turns += 1
        state.ops = {at}
        if state.turns >= ROUNDS - 1 and len(self._followed) < MOST and state.dtype in HALF:
            self._followed[id(state)] = state
        is_turn = state.turns <= EACH or state.turns >= state.compared_at + max(EACH, state.compared_at // MORE)
        return is_turn and state.dtype in HALF and self.session.readings.affords(operand.tensor)

    def _rounds_are_over(self, states: Sequence[_State], at: _At) -> None:
        _compare(states)
        for state in states:
            self._judge(state)
            state.begin_round(at)

    def _keep(self, call: _Call, real: Tensor, exact: Tensor) -> None:
        """Keeps what a result would be in float64."""
        key, now, at = _key(real), _elements(real, real.shape).clone(), (call.func, call.line)
        known = self._values.get(key) if call.changed else None
        if real.dtype not in HALF and call.copies_half:
            now = now.to(call.operands[1].now.dtype)
            if known is None:  # wider memory that holds half precision is state in half precision
                self._begin(real, now)
                return
        value = _Value(StorageWeakRef(real.untyped_storage()), now, exact, line=call.line, made=self.position.moment)
        if known is None:
            value.come_from = _ancestors(call, real, at)
            if value.come_from and real.dtype in HALF and real.numel() > SMALL and self._optimizer is None:
                self._results[key] = value
                while len(self._results) > MOST:
                    self._results.popitem(last=False)
        else:
            value.come_from, value.met_by = known.come_from, known.met_by
            if _is_home(value):
                self._change(call, value, real, value.come_from[0].state)
            elif _name(call.func) == "copy_":
                value.come_from, value.exact = _ancestors(call, real, at), call.operands[1].exact.reshape(-1)
        self._store(key, value)

    def _note_apart(self, state: _State, moment: _Moment) -> None:
        """Notes when a sum is another one than in float64 for the first time: it is judged later."""
        now, exact = state.last
        if state.apart_since is None and state.is_sum and self.session.readings.affords(now):
            state.apart_since = None if torch.equal(now.double(), exact) else moment

    def _change(self, call: _Call, value: _Value, real: Tensor, state: _State) -> None:
        """State has been written to."""
        operands, began, adds = call.operands, call.line, call.adds_to(state)
        come_from = [one for operand in operands if operand.value for one in operand.value.come_from]
        if _name(call.func) in _FILLING:
            value.exact = value.now.double()
            state.overwritten(value.now)
            return
        if _name(call.func) == "copy_":
            source = next((one for one in come_from if one.state is state and one.began), None)
            if self._results:
                self._is_taken(operands[1].key, real)
            if source is None or source.began is None:
                value.exact = value.now.double()
                state.overwritten(value.now)
                return
            came, adds = operands[1].value, source.adds
            # where what is written became as narrow as the state: there its change is rounded away
            is_narrow = operands[1].tensor.dtype in HALF and came is not None and came.line is not None
            began = came.line if is_narrow and came is not None else call.line
            if call.operands[1].tensor.dtype not in HALF:
                state.source = StorageWeakRef(call.operands[1].tensor.untyped_storage())
        if state.is_parameter or not state.in_step:
            self._note_statement(call, value, state)
        state.becomes(value.now, value.exact)
        self._note_apart(state, value.made)
        state.in_place, state.end = True, call.line
        state.parents |= {id(one.state) for one in come_from}
        if not state.in_step:  # there nothing comes back
            way = (state.last[1] - state.start[1]).abs()
            state.way = way if state.way is None else torch.maximum(way, state.way)
        state.adds = state.adds and adds
        if state.is_new:
            state.line, state.is_new = began, False
        if _name(call.func) in _ADDING and len(operands) > 1 and all(one.is_whole for one in operands):
            state.sums += 1
            if state.sums == 1 and len(self._merges) + len(self._added_to) < MOST:
                self._merges.append(state) if self._is_parameter(state) else self._added_to.add(state)
        self._look_at_each_call()

    def before_call(self, module: nn.Module) -> None:
        """An outermost module is called, with parameters that may have been computed from others; calls before it may not have been looked at."""
        self._gaps += self.position.call > self._last_call + 1
        self._last_call = self.position.call
        for parameter in parameters_in(module) if self._results or self._added_to else ():
            if _is_in_half(parameter):
                self._is_taken(_key(parameter), parameter)
        self._added_to.clear()

    def _is_taken(self, key: _Key, parameter: Tensor) -> None:
        """What lies here has become a parameter: what it was computed from was merged with something."""
        home = self._values.get(key)
        if home is not None and not home.held.expired() and _is_home(home):
            self._merges += self._added_to & {home.come_from[0].state}
        value = self._results.pop(key, None)
        if value is None or value.held.expired() or len(self._merges) >= MOST:
            return
        for one in value.come_from[:1]:
            if one.before is not None and one.before[0].shape == value.now.shape:
                state = _State.of(parameter, *one.before)
                state.becomes(value.now, value.exact)
                state.line, state.sums = value.line, 1
                self._merges.append(state)

    def _look_at_each_call(self) -> None:
        """What the calls of a module add to depends on each of them."""
        if self.position.stack and not self.checks.look.accumulating:
            self.checks.look.accumulating = [self.checks[Shadows].saw]

    def _is_parameter(self, state: _State) -> bool:
        at = state.home[:3]
        return any(
            _key(tensor)[:3] == at
            for _, _, tensor, _, is_buffer in self.names.tensors()
            if not is_buffer and measurable(tensor)
        )

    def _relatives(self, states: Iterable[_State]) -> Mapping[int, Sequence[tuple[_Value, _State]]]:
        """By the identity of state, values that come from it and from other state, or from such as was computed from it; with that other state."""
        found: defaultdict[int, list[tuple[_Value, _State]]] = defaultdict(list)
        asked = set(map(id, states))
        for value in self._values.values():
            if not value.come_from:
                continue
            first, *others = (one.state for one in value.come_from)
            of = dict.fromkeys(asked.intersection(map(id, others)) | (asked & first.parents), first)
            of.pop(id(first), None)
            if others and id(first) in asked:
                of[id(first)] = others[0]
            for state, other in of.items():
                found[state].append((value, other))
        return found

    @staticmethod
    def _is_kept(state: _State, relatives: Mapping[int, Sequence[tuple[_Value, _State]]]) -> bool:
        """Whether other state that is computed from it has the same error, but for the sign: what is lost in the larger one is added later."""
        error = (state.last[0].double() - state.last[1]).nan_to_num(0.0, 0.0, 0.0)
        others = [
            torch.stack([value.now.double(), value.exact - other.shift])
            for value, other in relatives.get(id(state), ())
            if value.exact.shape == error.shape
        ]
        if not others:
            return False
        values = torch.stack(others, 1).nan_to_num(0.0, 0.0, 0.0)
        errors = values[0] - values[1]
        left = torch.minimum((errors - error).norm(dim=1), (errors + error).norm(dim=1))
        size, of_state = values[0].norm(dim=1), state.last[0].double().norm()
        rest, whole = torch.minimum(size, of_state), torch.maximum(size, of_state)
        # A rest is small beside what it is the rest of; and it is there: what the program computes of state, ``p - before``, has its error, and is 0.
        is_rest = (rest <= SMALLER * whole) & (rest >= CANCELS * error.norm())
        return bool((is_rest & (left <= CANCELS * error.norm())).any())

    def _judge(self, state: _State) -> None:
        """Tells of state that has been compared."""
        line, stands = state.line, state.stands_still
        has_drifted = state.has_drifted()
        returns = state.returns >= RETURNS
        if (stands or has_drifted or returns) and self._is_kept(state, self._relatives([state])):
            state.still, state.returns = 0, 0
            stands = has_drifted = returns = False
        is_sum = state.is_sum or (state.adds and has_drifted)  # of an optimizer, too: its steps
        if state.adds and (has_drifted or (stands and is_sum and not self._is_parameter(state))):
            self._tell_sum(state)
        elif has_drifted:
            self._tell_use(state, "drift")
        if returns:
            self._tell_use(state, "restored")
        if stands and not is_sum and state.turns > self._told.get(line, 0):
            self._told[line] = state.turns
        if line in self._told and not is_sum:
            self._tell_lost(line)

    def _tell_lost(self, line: Line | None) -> None:
        """Tells of the state that a line changes, where most of it stands still; else withdraws what was told before."""
        of_line = self._changed_at(line)
        still = [state for state in of_line if state.stands_still]
        if sum(state.elements for state in still) < SHARE * sum(state.elements for state in of_line):
            still = []
        if of_line:
            self._emit_lost(line, still, of_line)

    def _changed_at(self, line: Line | None) -> Sequence[_State]:
        """The state that a line changes; of what it computes anew each time the latest."""
        found = [state for state in self._followed.values() if state.line == line and state.judged >= ROUNDS]
        last = max((state.step for state in found), default=0)
        return [state for state in found if state.in_place or state.step >= last - WINDOW]

    def _emit_lost(self, line: Line | None, still: Sequence[_State], compared: Sequence[_State]) -> None:
        worst = max(still or compared, key=lambda state: state.wanted)
        self.session.emit(
            LostWrites(
                source=_source(line),
                dtype=short_name(worst.dtype),
                tensors=len({state.home for state in still}),
                compared=len({state.home for state in compared}),
                checks=max(worst.still, 1),
                wanted=sum(state.wanted for state in still),
                lost=sum(state.lost for state in still),
                absmax=worst.absmax,
                change=worst.change,
                in_place=worst.in_place,
                optimizer=worst.in_step.of if worst.in_step else "",
                narrower=worst.in_step is not None and (not worst.in_step.is_half or worst.home[-1] not in HALF),
                way=abs(worst.net) / max(worst.still, 1) * worst.in_step.number if worst.in_step else 0.0,
            ),
            phase=worst.since[2],
            at=worst.since[:2],
        )

    def _tell_sum(self, state: _State) -> None:
        now, exact = state.last
        off = (now.double() - exact).abs()
        at = int(off.argmax())
        self.session.emit(
            RoundedSum(
                source=_source(state.line),
                dtype=short_name(state.dtype),
                added=state.turns - state.unseen_after,
                begins=float(state.first[0][at]) if state.unseen_after else None,
                exact=float(exact[at]),
                value=float(now[at]),
                error=float(off[at]),
                in_place=state.in_place,
            ),
            phase=(state.apart_since or state.met)[2],
            at=(state.apart_since or state.met)[:2],
        )

    def _tell_use(self, state: _State, use: str) -> None:
        """Writes a :class:`RoundedUse` of the element that is most off: from where float64 has got to, or from where it was before."""
        now, exact = state.last
        made_at, at, changed = _source(state.line), _source(state.line), state.not_restored[0]
        op = next((str(func) for func, line in state.ops if line == state.line), "aten.add.Tensor")
        made_by = op
        if use == "restored":
            exact, op, made_by, at, made_at = (
                state.first[1],
                "aten.sub_.Tensor",
                "aten.add_.Tensor",
                _source(state.end),
                "",
            )
        off = (now.double() - exact).abs().nan_to_num(0.0, 0.0, 0.0)
        if use == "drift":  # beside the largest, or, where most of the whole is lost, beside themselves
            least = digits_lost(short_name(state.dtype))
            is_most = bool(off.norm() > least * exact.norm())
            changed = int((off > least * (exact.abs() if is_most else state.peak)).sum())
        worst = int(off.argmax())
        self.session.emit(
            RoundedUse(
                use=use,
                op=op,
                source=at,
                made_by=made_by,
                made_at=made_at,
                dtype=short_name(state.dtype),
                value=f"{float(now[worst]):.6g}",
                exact=f"{float(exact[worst]):.6g}",
                changed=changed,
                of=exact.numel(),
            ),
            phase=state.met[2],
            at=state.met[:2],
        )

    def stop(self) -> None:
        """The program is over: what holds of each state in the end, and of parameters to which something was added once."""
        with self._looking, self.position.aside():
            for state in self._followed.values():
                if not state.is_new:
                    self._end(state)
            for line in self._told:
                self._tell_lost(line)
            self._tell_sums_of_once()
            for steps in {id(one.state.in_step): one.state.in_step for one in self._statements.values()}.values():
                self._tell_statements(steps)

    def _tell_sums_of_once(self) -> None:
        known = {state.home for state in self._followed.values() if state.judged or state.line in self._told}
        once = [state for state in self._merges if state.sums == 1 and state.home not in known]
        for line in {state.line for state in once} - set(self._told):
            self._tell_merges(line, [state for state in once if state.line == line])

    def _end(self, state: _State) -> None:
        """Compares state that nothing will change any more."""
        # Of what is computed anew the last result was not met again, and is not in what it has come to
        state.turns += state.in_place
        _compare([state])
        self._judge(state)
        state.begin_round()

    def _tell_merges(self, line: Line | None, merges: list[_State]) -> None:
        """Tells of a line that has added a tensor to each of some parameters once, which is mostly rounding."""
        for state in merges:
            state.turns = state.compared_at + 1
            state.start = state.first
        _compare(merges, least=0.0)
        asked = [state for state in merges if state.judged]
        noise = [
            state
            for state in asked
            if _energy(state.last[0], state.last[1]) >= NOISY * _energy(state.first[1], state.last[1])
        ]
        if noise and sum(state.elements for state in noise) >= MOSTLY * sum(state.elements for state in asked):
            self._emit_lost(line, noise, merges)

    def before_backward(self, tensors: list[Tensor]) -> None:
        """A backward pass begins: follows half-precision gradients that are there already, and are added to where no mode sees it."""
        if self.position.backward_depth or self._accumulated or self.position.step > BACKWARDS:
            return
        line = line_of(sys._getframe())
        with self._looking, self.position.aside():
            for leaf in leaves_of(tensors):
                gradient = leaf.grad
                if gradient is None or gradient.dtype not in HALF or not _is_readable(gradient):
                    continue
                if len(self._accumulated) < GRADIENTS and self.session.readings.affords(gradient):
                    self._follow_gradient(leaf, gradient, line)

    def _follow_gradient(self, leaf: Tensor, gradient: Tensor, line: Line | None) -> None:
        node = torch.autograd.graph.get_gradient_edge(leaf).node
        key, at = _key(gradient), (torch.ops.aten.add_.Tensor, line)
        value = self._begin(gradient, _elements(gradient, gradient.shape).clone())
        state = value.come_from[0].state
        state.turns, state.line, state.in_place = 1, line, True  # what is there is the first term

        def added(gradients: Sequence[Tensor]) -> None:
            if gradients[0] is None or self.position.muted or leaf.grad is None or _key(leaf.grad) != key:
                return
            with self._looking, self.position.aside():
                new = _elements(gradients[0], leaf.grad.shape)
                self._meet(self._operand(0, leaf.grad, leaf.grad.shape), value, at)
                value.exact = value.known(leaf.grad) + new.double()
                value.now = _elements(leaf.grad, leaf.grad.shape) + new
                value.made = self.position.moment
                state.is_new = False
                state.becomes(value.now, value.exact)

        # The node would go with the graph
        self._accumulated[key] = register_own(node.register_prehook, added), node, state

    def _end_gradients(self) -> None:
        """The gradients that were added up are taken, and those that follow are others."""
        with self._looking, self.position.aside():
            for handle, _, state in self._accumulated.values():
                handle.remove()
                if not state.is_new:
                    self._end(state)
        self._accumulated.clear()

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer steps: begins to look at its operators, where it has parameters in half precision."""
        self._end_gradients()
        self._stepping = None
        if any(isinstance(held, Optimizer) for held in vars(optimizer).values()):
            return  # a wrapper; the optimizer inside tells of itself
        half = list(filter(_is_in_half, parameters_of(optimizer)))
        cls = type(optimizer)
        steps = self._steps.setdefault(
            optimizer, _Steps(cls.__name__, self.position.step, bool(half), cls.__module__.startswith("torch."))
        )
        steps.number += 1
        is_asked = half or steps.has_half or steps.number <= ROUNDS  # its state shows in the first steps
        last, steps.last = steps.last, self.position.step
        if not is_asked or not (is_in_window(steps.number) or steps.last > last + 1):
            return
        self._optimizer, self._stepping = steps, []
        if not half or not is_checked(steps.number):
            return
        names = self.names.parameters()
        with self._looking, self.position.aside():
            self._stepping = [
                (one, self._parameter(steps, names[id(one)], one))
                for one in half
                if id(one) in names and one.grad is not None and measurable(one.grad)
            ]

    def _parameter(self, steps: _Steps, name: tuple[int, str], tensor: Tensor) -> _Parameter:
        """A parameter as it is before the step; begun anew where it lies elsewhere than in the step before."""
        now = _elements(tensor, tensor.shape).clone()
        value = self._values.get(_key(tensor))
        if value is None or value.held.expired() or not (_is_home(value) and value.come_from[0].state.is_parameter):
            value = self._begin(tensor, now, is_parameter=True)
        exact = value.known(tensor)
        parameter = steps.parameters.get(name)
        if parameter is None or parameter.first.shape != now.shape:
            nothing = torch.zeros_like(exact)
            parameter = _Parameter(
                name[1], dtype_name(tensor), tensor.numel(), now, nothing.bool(), nothing, (now, exact)
            )
            steps.parameters[name] = parameter
            uncollected([parameter.first, parameter.moves, parameter.signs])
        parameter.before = uncollected((now, exact))
        parameter.checks += 1
        parameter.signs += _elements(tensor.grad, tensor.shape).double().sign().nan_to_num()  # type: ignore[arg-type]
        return parameter

    def _note_statement(self, call: _Call, value: _Value, state: _State) -> None:
        """An operator at a line has changed a parameter, or what no optimizer steps."""
        if call.line is None or not self.session.readings.affords(value.now):
            return
        key, target = (id(state), call.func, call.line), call.operands[0]
        if key not in self._statements and len(self._statements) < MOST:
            signs = uncollected(torch.zeros_like(value.exact))
            is_torchs = self._optimizer is not None and self._optimizer.is_torchs
            self._statements[key] = _Statement(state, call.line, is_torchs, signs)
        statement = self._statements.get(key)
        if statement is None:
            return
        statement.calls += 1
        if statement.rounds < MEASURED and target.now.shape == value.now.shape:
            statement.add((target.now, target.exact), (value.now, value.exact))

    def _tell_statements(self, steps: _Steps | None) -> None:
        """Tells of lines whose changes of most parameters, or of what no optimizer steps, are lost, although these move."""
        totals = steps.parameters.values() if steps else ()
        if steps and not steps.is_torchs and all(one.lost >= MOSTLY * one.wanted > 0 for one in totals):
            return  # told of as a whole
        for at in {(func, line) for _, func, line in self._statements if steps or line not in self._told}:
            of_line = [one for key, one in self._statements.items() if key[1:] == at and one.state.in_step is steps]
            lost = [one for one in of_line if one.is_without_effect]
            relatives = self._relatives(one.state for one in lost) if steps is None else {}
            lost = [one for one in lost if not self._is_kept(one.state, relatives)]
            if not lost or 2 * len(lost) <= len(of_line):
                continue
            self.session.emit(
                LostWrites(
                    source=_source(at[1]),
                    dtype=short_name(lost[0].state.dtype),
                    tensors=len(lost),
                    compared=len(of_line),
                    checks=max(one.rounds for one in lost),
                    wanted=sum(one.wanted for one in lost),
                    lost=sum(one.lost for one in lost),
                    absmax=max(one.absmax for one in lost),
                    change=max(one.change for one in lost),
                    in_place=True,
                )
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """It has stepped."""
        stepped, self._stepping, self._optimizer = self._stepping, None, None
        if not stepped:
            return
        with self._looking, self.position.aside():
            self._compare_step(optimizer, self._steps[optimizer], stepped)

    def _compare_step(self, optimizer: Optimizer, steps: _Steps, stepped: list[tuple[Tensor, _Parameter]]) -> None:
        pairs = [self._after(tensor) for tensor, _ in stepped]
        counted = [one.counts(*pair) for (_, one), pair in zip(stepped, pairs, strict=True)]
        rows = torch.stack([row.to(counted[0].device) for row in counted]).tolist()  # a device is waited for once
        overshot: dict[str, OvershotParameter] = {}
        relatives = self._relatives(self._values[_key(tensor)].come_from[0].state for tensor, _ in stepped)
        for (tensor, parameter), pair, (*counts, far, moved, update) in zip(stepped, pairs, rows, strict=True):
            parameter.add(counts)
            if counts[1] >= MOSTLY * counts[0] > 0:
                state = self._values[_key(tensor)].come_from[0].state
                state.becomes(*pair)
                parameter.is_kept = self._is_kept(state, relatives)
            if far >= max(ENOUGH_TOO_FAR, MANY_TOO_FAR * len(pair[0])):
                overshot[parameter.name] = OvershotParameter(
                    elements=len(pair[0]),
                    overshot=int(far),
                    dtype=parameter.dtype,
                    moved=moved,
                    update=update,
                )
        self._tell_steps(optimizer, steps)
        self._tell_statements(steps)
        if overshot and not steps.overshot:
            steps.overshot = True
            worst = sorted(overshot.items(), key=lambda pair: -pair[1].overshot / pair[1].elements)[:MOST_TOLD]
            self.session.emit(
                Overshoots(
                    optimizer=type(optimizer).__name__,
                    lr=_rate(optimizer),
                    compared=len(stepped),
                    parameters=dict(worst),
                )
            )

    def _after(self, tensor: Tensor) -> _Pair:
        """A parameter as it is after the step, and what it would be; what is a copy of float32 state that outlives the step is as it should be."""
        value, now = self._values[_key(tensor)], _elements(tensor, tensor.shape).clone()
        state = value.come_from[0].state
        exact = value.known(tensor)
        if state.source is not None and not state.source.expired():
            exact = value.exact = now.double()
        state.source = None
        return now, exact

    def _tell_steps(self, optimizer: Optimizer, steps: _Steps) -> None:
        totals = list(steps.parameters.values())
        stalled = _stalled(totals)
        if not stalled and not steps.is_told:
            return
        steps.is_told = True  # from now on each check is, so that the last record says what holds in the end
        self.session.emit(
            Updates(
                optimizer=type(optimizer).__name__,
                lr=_rate(optimizer),
                checks=steps.number,
                first_step=steps.first,
                wanted=sum(total.wanted for total in totals),
                lost=sum(total.lost for total in totals),
                parameters=dict(stalled[:MOST_TOLD]),
                compared=len(totals),
                finite=sum(total.is_finite for total in totals),
            )
        )


def _stalled(totals: Sequence[_Parameter]) -> list[tuple[str, StalledParameter]]:
    """The parameters that have lost most of their updates, worst first; those of one name in several outermost modules as one."""
    named: defaultdict[str, list[_Parameter]] = defaultdict(list)
    for total in totals:
        if total.wanted and total.lost >= MOSTLY * total.wanted and not total.is_kept:
            named[total.name].append(total)
    told = {
        name: StalledParameter(
            wanted=sum(one.wanted for one in same),
            lost=sum(one.lost for one in same),
            dtype=same[0].dtype,
            elements=sum(len(one.first) for one in same),
            absmax=max(one.absmax for one in same),
            update=max(one.update for one in same),
            asked=sum(round(one.asked * one.elements / len(one.first)) for one in same),
            still=sum(round(one.still * one.elements / len(one.first)) for one in same),
            steady=max(one.steady for one in same),
            parameters=len(same),
        )
        for name, same in named.items()
    }
    return sorted(told.items(), key=lambda pair: -pair[1].lost / pair[1].wanted)


def _ancestors(call: _Call, result: Tensor, at: _At) -> tuple[_From, ...]:
    """The state that a result is computed from; what has been there for longer first."""
    found: dict[int, _From] = {}
    for operand in call.operands:
        for state, began, adds, before in (
            operand.value.come_from if operand.value is not None and operand.is_whole else ()
        ):
            before = (operand.now, operand.exact) if began is None else before
            adds = adds and call.adds_to(state)
            found.setdefault(id(state), _From(state, began or at, adds, before))
    return tuple(sorted(found.values(), key=lambda one: -one.state.turns)[:MOST_ANCESTORS])


def _is_home(value: _Value) -> bool:
    """Whether a value is state, and none that is computed from it."""
    return bool(value.come_from) and value.come_from[0].began is None


def _broadcast_to(shape: torch.Size, known: Tensor, tensor: Tensor, otherwise: Tensor) -> Tensor:
    """The float64 values of an operand at the elements that are followed of a result; ``otherwise`` where they are not known."""
    if tensor.shape == shape:
        return known
    if tensor.numel() == known.numel():  # all elements of what is broadcast are known
        return _elements(known.reshape(tensor.shape), shape)
    return otherwise


def _is_in_half(tensor: Tensor) -> bool:
    """Whether a tensor holds half precision that can be measured."""
    return tensor.dtype in HALF and tensor.numel() > 0 and measurable(tensor)


def _broadcast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int, Tensor, torch.Size]]:
    """The tensors of a call with the shape that each is broadcast to: all to one, or in lists each to that at its position."""
    if not (args and isinstance(args[0], (list, tuple))):
        tensors = tensors_of((args, kwargs))
        shape = _common_shape([tensor.shape for tensor in tensors])
        yield from ((0, tensor, shape) for tensor in tensors)
        return
    for value in (*args, *kwargs.values()):
        if isinstance(value, (list, tuple)):
            pairs = enumerate(zip(value, args[0], strict=False))
            yield from ((number, one, like.shape) for number, (one, like) in pairs if isinstance(one, Tensor))


def _common_shape(shapes: Sequence[torch.Size]) -> torch.Size:
    """What all are broadcast to. torch's own function imports sympy, whose filter for warnings makes those of the program come once more."""
    longest = max(map(len, shapes), default=0)
    columns = zip(*((1,) * (longest - len(shape)) + tuple(shape) for shape in shapes), strict=True)
    return torch.Size(next((size for size in column if size != 1), 1) for column in columns)


def _as_they_are(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[int, Tensor, torch.Size]]:
    """The tensors of a call, none of them broadcast."""
    yield from ((0, tensor, tensor.shape) for tensor in tensors_of((args, kwargs)))


def _elements(tensor: Tensor, shape: torch.Size) -> Tensor:
    """The elements of a tensor that are followed, where it is broadcast to a shape; a single one that is broadcast stays one."""
    values = tensor.detach()
    if values.numel() == 1:
        return values.reshape(1 if shape.numel() == 1 else ())
    if values.shape != shape:
        values = values.expand(shape)
    if values.is_contiguous() or shape.numel() <= LARGEST_WHOLE:
        return values.reshape(-1)[:: _stride(shape)]
    at = torch.arange(0, shape.numel(), _stride(shape), device=values.device)
    return values[torch.unravel_index(at, shape)]


def _elements_of(
    func: Any, arguments: Arguments, stand_ins: dict[int, Tensor], changed: Sequence[Tensor]
) -> list[Tensor]:
    """The elements that are followed of what an operator that is run as a whole makes in float64, or of the running statistics that it writes to."""
    exact = in_wider(func, arguments, torch.float64, (*HALF, torch.float32), stand_ins)
    if writes_besides(func):
        exact = tensors_of([stand_ins.get(id(one)) for one in changed])
    return [_elements(one, one.shape) for one in exact]


def _stride(shape: torch.Size) -> int:
    return max(1, -(-shape.numel() // SAMPLED))


@cache
def _is_by_element(func: Any) -> bool:
    """Whether an operator treats each element by itself, and draws no random numbers."""
    if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    name = _name(func)
    is_fused = name.startswith("_fused_") and bool(schema_of(func).is_mutable)
    return torch.Tag.pointwise in func.tags or name in ("copy_", "_to_copy") or name.startswith("_foreach_") or is_fused


@cache
def _is_followed_whole(func: Any) -> bool:
    """Whether an operator that does not treat each element by itself writes some into its first operand, or reads some of it."""
    name = _name(func)
    return has_wide_form(func) and (name in _READING or (bool(names_written(func)) and not name.endswith("__")))


@cache
def _name(func: Any) -> str:
    return str(schema_of(func).name).removeprefix("aten::")


def _is_readable(tensor: Tensor) -> bool:
    if tensor.is_floating_point():
        return measurable(tensor) and tensor.numel() > 0
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_complex()
    return plain and not tensor.is_meta and tensor.numel() > 0


def _key(tensor: Tensor) -> _Key:
    try:
        memory = memory_key(tensor.untyped_storage())
    except (NotImplementedError, RuntimeError):  # sparse tensors and some wrappers have none
        memory = 0
    if tensor.layout is not torch.strided:
        return (memory, 0, tensor.shape, (), tensor.dtype)
    if tensor.is_contiguous():  # however it is viewed
        return (memory, int(tensor.storage_offset()), torch.Size([tensor.numel()]), (1,), tensor.dtype)
    return (memory, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)


def _energy(values: Tensor, others: Tensor) -> float:
    return float((values.double() - others).square().nan_to_num(0.0, 0.0, 0.0).sum())


def _rate(optimizer: Optimizer) -> float:
    return float(optimizer.param_groups[0].get("lr", 0.0))


def _source(line: Line | None) -> str:
    return "" if line is None else line.source
