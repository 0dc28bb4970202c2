"""Weights that an optimizer cannot move: updates below what half precision can tell apart, and steps that go much too far."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from dtypedoctor._torch_private import MemoryRef, has_hooks_of_the_program, version_of
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.silent.observer import Observer, parameters_of
from dtypedoctor.instrument.statistics import HALF, measurable
from dtypedoctor.interruptions import contained
from dtypedoctor.trace.events import LOST_UPDATES
from dtypedoctor.trace.records.silent import Overshoots, OvershotParameter, StalledParameter, Updates
from dtypedoctor.unpatched import unwrap

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

__all__ = ["MOSTLY", "SAMPLED", "UpdateCheck", "is_checked", "with_other_parameters"]

SAMPLED = 4096
"""Elements of a parameter that are compared."""
SMALL = 65536
"""Largest parameter of which all elements are compared where the optimizer may not treat each element by itself."""
FIRST_CHECKS = 4
"""The steps that are checked are 1 to 4, and then each power of two."""
MOSTLY = 0.5
"""Share of lost updates from which on a parameter is worth telling of."""
MOST_TOLD = 40
TOO_FAR = 16.0
"""A change this many times that of the float32 copy, and beyond the rounding of the parameter, is not due to rounding."""
MANY_TOO_FAR = 0.01
"""Share of a parameter's elements that have to move too far, and at least so many:"""
ENOUGH_TOO_FAR = 8
NEAR, MOSTLY_NEAR = 2.0**-4, 0.9
"""Difference that a few roundings to bfloat16 explain between what is missing and what is kept of it; and the share of the elements that have to agree."""
TINY = 0.25
"""Updates below this share of the spacing never move a weight where it is rounded to the nearest number."""
AS_FAR = 0.5
"""Share of all tiny updates that weights have to move by, of themselves, where these are rounded at random; twice the other way round."""

_ELEMENTWISE = "torch.optim."
_NOT_ELEMENTWISE = frozenset({"Adafactor", "Muon", "LBFGS", "SparseAdam"})
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)

_Key = tuple[int, str]
"""Number of the outermost module, and the dotted name of a parameter in it."""
_State = dict[str, Any]


@dataclass(slots=True)
class _Sample:
    """Elements of a parameter before the step, and what the float32 copy makes of them.

    Attributes:
        state: what the float32 copy's own steps so far have left of the optimizer's state; None where they were not followed from the first on.
        begun: the optimizer's state before the step, where they were not.
        unseen: what the parameter differs from the float32 copy after the steps before, where these were followed.
    """

    key: _Key
    parameter: Tensor
    stride: int
    before: Tensor
    copy: nn.Parameter
    state: _State | None = None
    begun: _State = field(default_factory=dict)
    unseen: Tensor | float = 0.0

    def missing(self) -> Tensor:
        """What the parameter lacks of the float32 updates so far."""
        return self.unseen + self.copy.detach() - self.now().float()

    def now(self) -> Tensor:
        """The same elements as they are now."""
        return _strided(self.parameter, self.stride)


@dataclass(slots=True)
class _Total:
    """What the checks of one parameter have found so far, in elements.

    Attributes:
        weights: elements of the whole parameter.
        first: the compared elements before the first step that was checked.
        moves: which of them move in float32 in one of the steps so far.
        signs: of each, the sum of the signs of its gradients.
    """

    dtype: str
    elements: int
    weights: int
    first: Tensor
    moves: Tensor
    signs: Tensor
    checks: int = 0
    steady: float = 0.0
    asked: int = 0
    still: int = 0
    wanted: int = 0
    lost: int = 0
    absmax: float = 0.0
    update: float = 0.0
    finite: bool = False

    @classmethod
    def of(cls, sample: _Sample) -> "_Total":
        """Of a parameter that has not been compared yet."""
        before = sample.before
        nothing = torch.zeros_like(before)
        return cls(
            dtype_name(sample.parameter), before.numel(), sample.parameter.numel(), before, nothing.bool(), nothing
        )

    def counts(self, sample: _Sample) -> Tensor:
        """What :meth:`add` adds, on the device: elements that move in float32, and those of them that did not move; largest finite weight and update; elements with a
        finite update; finite elements that have moved in float32 in any step so far, and those of them that are what they were before the first one; how
        much the signs of the gradients agree."""
        before, now = sample.before.float(), sample.now()
        update = sample.copy.detach() - before
        wanted = update.ne(0) & update.isfinite()
        self.moves |= wanted
        asked = self.moves & now.isfinite()  # NaN is another failure than weights that stand still
        if sample.copy.grad is not None:
            self.checks += 1
            self.signs += sample.copy.grad.sign().nan_to_num().to(self.signs.dtype)
        numbers = (
            wanted.sum(),
            (wanted & now.eq(sample.before)).sum(),
            torch.where(before.isfinite(), before.abs(), 0.0).max(),
            torch.where(wanted, update.abs(), 0.0).max(),
            update.isfinite().sum(),
            asked.sum(),
            (asked & now.eq(self.first)).sum(),
            self.signs.float().abs().mean() / max(self.checks, 1),
        )
        return torch.stack([number.double() for number in numbers])

    def add(self, counts: Sequence[float]) -> None:
        """Adds what a step has come to."""
        wanted, lost, absmax, update, finite, asked, still, self.steady = counts
        self.wanted, self.lost = self.wanted + int(wanted), self.lost + int(lost)
        self.asked, self.still = int(asked), int(still)
        self.absmax, self.update = max(self.absmax, absmax), max(self.update, update)
        self.finite |= finite > 0


@dataclass(slots=True)
class _Known:
    """What the checks of one optimizer have found so far.

    Attributes:
        first: the first step that was checked.
        followed: by parameter, the state of the float32 copy after the last step, what the optimizer's own was then, and what was missing.
        is_kept: whether the optimizer's state has held, after each check, what was missing; None where nothing was.
        tiny: of updates that are too small to move a weight by rounding: their sum, what the weights moved, and how many moved.
    """

    first: int
    totals: dict[_Key, _Total] = field(default_factory=dict)
    followed: dict[_Key, tuple[_State, dict[Any, Any], Tensor]] = field(default_factory=dict)
    steps: int = 0
    overshot: bool = False
    told: bool = False
    is_kept: bool | None = None
    tiny: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def adds_up(self) -> bool:
        """Whether nothing is lost in the long run: it is kept and added later (Kahan summation), or weights are rounded at random."""
        asked, moved, many = self.tiny
        return bool(self.is_kept) or (many >= ENOUGH_TOO_FAR and AS_FAR * asked <= moved <= asked / AS_FAR)


class UpdateCheck(Observer):
    """Writes an :class:`Updates` after each checked step in which parameters lose most of their updates.

    And an :class:`Overshoots` after the first checked step in which they move much too far: a second moment that rounds to zero leaves next to nothing
    to divide by.

    A few thousand elements of each half-precision parameter are compared with themselves around a step, and the
    same optimizer takes the same step on a float32 copy of these elements, of their gradients and of its own state. What moves
    there and not here is lost to rounding.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._known: WeakKeyDictionary[Optimizer, _Known] = WeakKeyDictionary()
        self._samples: list[_Sample] = []

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step: its copy does so first."""
        self._samples = []
        if any(isinstance(held, Optimizer) for held in vars(optimizer).values()):
            return  # a wrapper; the optimizer inside tells of itself
        known = self._known.setdefault(optimizer, _Known(self.position.step))
        known.steps += 1
        if not is_checked(known.steps):
            return
        followed, known.followed = known.followed, {}
        hooked = has_hooks_of_the_program(optimizer)
        with self.position.mute(), torch.no_grad():
            self._samples = self._taken(optimizer)
            for sample in self._samples:
                sample.state = None if hooked else _followed_state(optimizer, sample, followed, known.steps)
                sample.unseen = followed[sample.key][2] if sample.state else 0.0
            if self._samples and (why := _why_not_copied(optimizer) or _step_in_float32(optimizer, self._samples)):
                self._give_up(optimizer, why)

    def _taken(self, optimizer: Optimizer) -> list[_Sample]:
        """The elements that are compared: of optimizers that treat each by itself a few, of others all of small parameters."""
        half = [parameter for parameter in parameters_of(optimizer) if parameter.dtype in HALF]
        by_element = _by_element(optimizer)
        if not by_element and any(parameter.numel() > SMALL for parameter in half):
            why = f"it may not treat each element by itself, so that parameters of more than {SMALL:,} are left out"
            self.session.guard.tell(f"{LOST_UPDATES}{type(optimizer).__name__}", why)
        known = self.names.parameters() if half else {}
        samples: list[_Sample] = []
        for parameter in half:
            gradient = parameter.grad
            if gradient is None or not parameter.numel() or id(parameter) not in known:
                continue
            if not (measurable(parameter) and measurable(gradient) and parameter.is_contiguous()):
                continue
            if not by_element and parameter.numel() > SMALL:
                continue
            stride = math.ceil(parameter.numel() / SAMPLED) if by_element else 1
            before = _strided(parameter, stride).clone()
            copy = nn.Parameter(before.float())
            copy.grad = _strided(gradient, stride).float()
            samples.append(_Sample(known[id(parameter)], parameter, stride, before, copy))
        return samples

    def _give_up(self, optimizer: Optimizer, why: str) -> None:
        self._samples = []
        self.session.guard.tell(f"{LOST_UPDATES}{type(optimizer).__name__}", why)

    def after_step(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped."""
        samples, self._samples = self._samples, []
        if not samples:
            return
        known = self._known[optimizer]
        with self.position.mute(), torch.no_grad():
            if wider := next(filter(None, (_wider_copy(optimizer, sample) for sample in samples)), ""):
                why = f"its state holds the weights in a wider dtype ({wider}), in which their updates are not lost"
                self._give_up(optimizer, why)
                return
            if known.steps < FIRST_CHECKS:
                known.followed = {
                    sample.key: (sample.state, _left(optimizer, sample), sample.missing())
                    for sample in samples
                    if sample.state
                }
            # later steps do not follow each other: what is kept by then is of steps that were not seen
            if known.steps <= FIRST_CHECKS:
                kept = _is_kept(optimizer, samples)
                known.is_kept = kept if known.is_kept is None or kept is False else known.is_kept
            moved = torch.stack(list(map(_moved_by_chance, samples))).sum(0).tolist()
            known.tiny = tuple(a + b for a, b in zip(known.tiny, moved, strict=True))
            self._count(known, samples)
            if not known.overshot and all(sample.state is not None for sample in samples):
                known.overshot = self._tell_overshoots(optimizer, samples)
        self._tell(optimizer, known)

    @staticmethod
    def _count(known: _Known, samples: list[_Sample]) -> None:
        """Adds the step to the totals, with one reading of the device; one begins anew where other elements of a parameter are compared than before."""
        totals = []
        for sample in samples:
            total = known.totals.get(sample.key)
            if total is None or total.first.shape != sample.before.shape:
                total = known.totals[sample.key] = _Total.of(sample)
            totals.append(total)
        counts = torch.stack([total.counts(sample).cpu() for total, sample in zip(totals, samples, strict=True)])
        for total, numbers in zip(totals, counts.tolist(), strict=True):
            total.add(numbers)

    def _tell_overshoots(self, optimizer: Optimizer, samples: list[_Sample]) -> bool:
        counted = torch.stack([_too_far(sample) for sample in samples]).tolist()
        overshot = {
            sample.key[1]: OvershotParameter(
                elements=sample.before.numel(),
                overshot=int(many),
                dtype=dtype_name(sample.parameter),
                moved=moved,
                update=update,
            )
            for sample, (many, moved, update) in zip(samples, counted, strict=True)
            if many >= max(ENOUGH_TOO_FAR, MANY_TOO_FAR * sample.before.numel())
        }
        if overshot:
            worst = sorted(overshot.items(), key=lambda pair: -pair[1].overshot / pair[1].elements)[:MOST_TOLD]
            self.session.emit(
                Overshoots(
                    optimizer=type(optimizer).__name__,
                    lr=float(optimizer.param_groups[0].get("lr", 0.0)),
                    compared=len(samples),
                    parameters=dict(worst),
                )
            )
        return bool(overshot)

    def _tell(self, optimizer: Optimizer, known: _Known) -> None:
        totals = known.totals.values()
        stalled = [] if known.adds_up else _stalled(known.totals)
        if not stalled and not known.told:
            return
        known.told = True  # from now on each check is, so that the last record says what holds in the end
        self.session.emit(
            Updates(
                optimizer=type(optimizer).__name__,
                lr=float(optimizer.param_groups[0].get("lr", 0.0)),
                checks=known.steps,
                first_step=known.first,
                wanted=sum(total.wanted for total in totals),
                lost=sum(total.lost for total in totals),
                parameters=dict(stalled[:MOST_TOLD]),
                compared=len(totals),
                finite=sum(total.finite for total in totals),
            )
        )


def is_checked(number: int) -> bool:
    """Whether the step with this number, from 1, is checked."""
    return number <= FIRST_CHECKS or number.bit_count() == 1


def with_other_parameters(
    optimizer: Optimizer,
    fields: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    others: Mapping[int, tuple[Any, Any]],
) -> Optimizer:
    """An optimizer of the same class on other parameters, with nothing in common but its ``fields``.

    Args:
        optimizer: the program's.
        fields: the attributes of the copy.
        groups: its groups, with the parameters of the program.
        others: by the identity of such a parameter, what stands for it and for its state; a parameter without is left out.
    """
    copy: Optimizer = object.__new__(type(optimizer))
    vars(copy).update(fields)
    copy.state = defaultdict(dict, {parameter: state for parameter, state in others.values() if state})
    copy.param_groups = [
        {**group, "params": [others[id(p)][0] for p in group["params"] if id(p) in others]} for group in groups
    ]
    return copy


def _stalled(totals: dict[_Key, _Total]) -> list[tuple[str, StalledParameter]]:
    """The parameters that have lost most of their updates, worst first; those of one name in several outermost modules as one."""
    named: defaultdict[str, list[_Total]] = defaultdict(list)
    for (_, name), total in totals.items():
        if total.wanted and total.lost >= MOSTLY * total.wanted:
            named[name].append(total)
    told = {
        name: StalledParameter(
            wanted=sum(t.wanted for t in of_name),
            lost=sum(t.lost for t in of_name),
            dtype=of_name[0].dtype,
            elements=sum(t.elements for t in of_name),
            absmax=max(t.absmax for t in of_name),
            update=max(t.update for t in of_name),
            asked=sum(round(t.asked * t.weights / t.elements) for t in of_name),
            still=sum(round(t.still * t.weights / t.elements) for t in of_name),
            steady=max(t.steady for t in of_name),
            parameters=len(of_name),
        )
        for name, of_name in named.items()
    }
    return sorted(told.items(), key=lambda pair: -pair[1].lost / pair[1].wanted)


def _by_element(optimizer: Optimizer) -> bool:
    """Whether the optimizer is known to treat each element by itself, so that a few can stand for all."""
    step = unwrap(type(optimizer).step)
    return step.__module__.startswith(_ELEMENTWISE) and type(optimizer).__name__ not in _NOT_ELEMENTWISE


def _is_torchs(optimizer: Optimizer) -> bool:
    """Whether it keeps everything in the state of parameters, of which a copy gets a copy."""
    return type(optimizer).__module__.startswith(_ELEMENTWISE)


def _strided(tensor: Tensor, stride: int) -> Tensor:
    return tensor.detach().reshape(-1)[::stride] if stride > 1 else tensor.detach()


@cache
def _of_every_optimizer() -> frozenset[str]:
    """The attributes that torch gives an optimizer; ``step`` is replaced in it by schedulers of the learning rate."""

    class Bare(Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Does nothing."""

    return frozenset(vars(Bare([nn.Parameter(torch.zeros(1))], {}))) | {"step"}


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {name: held for name, held in vars(optimizer).items() if name not in _of_every_optimizer()}


def _is_plain(value: Any) -> bool:
    """Whether a copy of it has nothing in common with it: a function of a module keeps nothing between two calls, one with a closure may."""
    if isinstance(value, FunctionType):
        return value.__closure__ is None and not vars(value)
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    if type(value) in (dict, defaultdict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return isinstance(value, _PLAIN)


def _why_not_copied(optimizer: Optimizer) -> str:
    """Why no copy of the optimizer may make a step: it would write to what the program's own one holds, or call other ranks. Empty where it may."""
    if _is_torchs(optimizer):
        return ""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return "its step may call collectives, so that no copy of it makes a step beside it"
    groups = [{**group, "params": ()} for group in optimizer.param_groups]
    for held in (_own_attributes(optimizer), optimizer.defaults, *groups):
        shared = next((name for name, value in held.items() if not _is_plain(value)), None)
        if shared is not None:
            return f"it holds more than numbers ({shared}), which a copy of it that makes a step would write to"
    return ""


def _left(optimizer: Optimizer, sample: _Sample) -> dict[Any, Any]:
    """By which it is seen later whether anybody but a step has changed the optimizer's state of the parameter."""
    state = optimizer.state.get(sample.parameter, {})
    return {
        key: (MemoryRef(held), version_of(held)) if isinstance(held, Tensor) else held for key, held in state.items()
    }


def _is_as_left(value: Any, left: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(left, tuple) and left[0].is_of(value) and left[1] == version_of(value)
    return _is_plain(value) and bool(value == left)


def _followed_state(
    optimizer: Optimizer, sample: _Sample, followed: dict[_Key, tuple[_State, dict[Any, Any], Tensor]], number: int
) -> _State | None:
    """The state that the copy's own steps so far have left; empty where the optimizer begins, None where its state is not what its steps have left."""
    state = optimizer.state.get(sample.parameter, {})
    if not state and (number == 1 or sample.key in followed):
        return {}  # also where a program has reset it between two steps
    if sample.key not in followed:
        return None
    copied, left, _ = followed[sample.key]
    return copied if state.keys() == left.keys() and all(_is_as_left(state[key], left[key]) for key in left) else None


def _step_in_float32(optimizer: Optimizer, samples: list[_Sample]) -> str:
    """Lets a copy of the optimizer, with a float32 copy of its state, step on the copies; why it could not, or empty."""
    others: dict[int, tuple[nn.Parameter, _State]] = {}
    for sample in samples:
        begun, state = optimizer.state.get(sample.parameter, {}), sample.state
        if not state:
            state = _state_in_float32(begun, sample)
            if begun:  # before it was followed
                sample.state, sample.begun = None, state or {}
        if state is None:
            return "its state is not that of single elements, or cannot be read"
        others[id(sample.parameter)] = sample.copy, state
    fields, groups = dict(vars(optimizer)), [dict(group) for group in optimizer.param_groups]
    if not _is_torchs(optimizer):
        parameters = [group.pop("params") for group in groups]
        own = {**_own_attributes(optimizer), "defaults": optimizer.defaults}
        own, groups = deepcopy((own, groups))  # together, as the groups hold what the defaults do
        fields.update(own)
        groups = [{**group, "params": of} for group, of in zip(groups, parameters, strict=True)]
    twin = with_other_parameters(optimizer, fields, groups, others)
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    # An optimizer may want a closure, say: then nothing is claimed about it.
    with contained() as trial, torch.random.fork_rng(devices=devices, enabled=not _by_element(optimizer)):
        unwrap(type(optimizer).step)(twin)
    for sample in samples:
        sample.state = twin.state.get(sample.copy) if sample.state is not None else None
    return "" if trial.error is None else f"no copy of it can make a step by itself ({type(trial.error).__name__})"


def _state_in_float32(state: _State, sample: _Sample) -> _State | None:
    """A copy of the state of one parameter that belongs to the sampled elements; None for state that has no such part."""
    copied: _State = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            if not isinstance(value, (int, float, bool, str, type(None))):
                return None
            copied[key] = value
            continue
        if value.numel() > 1:  # else a count of steps, or what an optimizer keeps of a parameter of one element
            if value.shape != sample.parameter.shape or not measurable(value):
                return None  # of no single elements, or quantized
            value = _strided(value, sample.stride)
        copied[key] = value.float() if value.dtype in HALF else value.clone()
    return copied


def _wider_copy(optimizer: Optimizer, sample: _Sample) -> str:
    """Name of what the optimizer's state holds of a parameter that the parameter was rounded from; empty where there is no such thing."""
    state = optimizer.state.get(sample.parameter, {}).items()
    wide = [(key, value) for key, value in state if isinstance(value, Tensor) and value.dtype not in HALF]
    same = [(key, value) for key, value in wide if value.shape == sample.parameter.shape and measurable(value)]
    now = sample.now()
    if not same or not now.any():
        return ""
    rounded = (str(key) for key, value in same if torch.equal(_strided(value, sample.stride).to(now.dtype), now))
    return next(rounded, "")


def _is_kept(optimizer: Optimizer, samples: list[_Sample]) -> bool | None:
    """Whether something in the optimizer's state is, but for its sign, what the parameters lack of their float32 updates; None where they lack nothing."""
    missing: list[Tensor] = []
    kept: defaultdict[Any, list[Tensor]] = defaultdict(list)
    for sample in samples:
        lack = sample.missing().abs().nan_to_num(0.0, 0.0)
        noise = FIRST_CHECKS * torch.finfo(torch.float32).eps * sample.before.float().abs()
        missing.append((lack > noise).sum().double())
        for key, held in optimizer.state.get(sample.parameter, {}).items():
            if isinstance(held, Tensor) and held.shape == sample.parameter.shape and measurable(held):
                now, before = _strided(held, sample.stride).float(), sample.begun.get(key, 0.0)
                off = torch.minimum((now.abs() - lack).abs(), ((now - before).abs() - lack).abs())
                kept[key].append(((lack > noise) & (off <= NEAR * lack + noise)).sum().double())
    asked, *agreeing = torch.stack([torch.stack(many).sum() for many in (missing, *kept.values())]).tolist()
    return max(agreeing, default=0.0) >= MOSTLY_NEAR * asked if asked else None


def _moved_by_chance(sample: _Sample) -> Tensor:
    """Of updates that are too small to move a weight by rounding to the nearest number: their sum, what the weights moved, and how many moved."""
    before = sample.before.float()
    update, moved = sample.copy.detach() - before, sample.now().float() - before
    finfo = torch.finfo(sample.before.dtype)
    spacing = torch.ldexp(torch.full_like(before, finfo.eps), torch.frexp(before).exponent - 1).clamp_min(finfo.tiny)
    # a weight of 0 takes any update
    tiny = update.ne(0) & before.ne(0) & (update.abs() < TINY * spacing) & moved.isfinite()
    numbers = (update.abs()[tiny].sum(), (moved * update.sign())[tiny].sum(), (tiny & moved.ne(0)).sum())
    return torch.stack([number.double() for number in numbers])


def _too_far(sample: _Sample) -> Tensor:
    """Elements that moved much further than in float32; the largest of these changes, and the largest of theirs in float32."""
    before = sample.before.float()
    update = (sample.copy.detach() - before).abs()
    moved = (sample.now().float() - before).abs()
    rounding = torch.finfo(sample.before.dtype).eps * before.abs() + torch.finfo(sample.before.dtype).tiny
    too_far = moved > TOO_FAR * update + 2 * rounding
    too_far &= bool(moved.isfinite().all())  # what is not finite is a finding of its own
    numbers = (too_far.sum(), torch.where(too_far, moved, 0.0).max(), torch.where(too_far, update, 0.0).max())
    return torch.stack([number.double() for number in numbers])
