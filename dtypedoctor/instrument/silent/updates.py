"""Training that half precision is too coarse for: gradients that float16 flushes to zero, updates that weights are too coarse to feel."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.statistics import HALF, measurable
from dtypedoctor.interruptions import contained
from dtypedoctor.trace.events import LOST_UPDATES
from dtypedoctor.trace.records.execution import AutocastRegion
from dtypedoctor.trace.records.silent import (
    GradientZeros,
    Overshoots,
    OvershotParameter,
    ScaledGradient,
    StalledParameter,
    Updates,
    Zeros,
)
from dtypedoctor.unpatched import unwrap

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

SCALE = 32768.0
"""The largest power of two that float16 holds; half of what a gradient scaler begins with."""
MANY = 0.5
"""Share of zeros in a parameter's gradient from which on it is worth a second look."""


class GradientCheck(Observer):
    """Counts zeros in gradients where float16 is at work.

    Zeros alone prove nothing: tokens that do not occur, ReLU and dropout give them too. Where
    there are many, the calls of the step are made again with what their backward passes start from multiplied by 32768 (`in_place.py`).

    Before an optimizer step it writes a :class:`GradientZeros`, where a gradient is zero for the most part.

    Attributes:
        on_zeros: called where a :class:`GradientZeros` has been written.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._float16_region = False
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._dead: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self.on_zeros: list[Callable[[], None]] = []

    def entered(self, region: AutocastRegion) -> None:
        """An autocast region is entered."""
        self._float16_region = self._float16_region or region.dtype == "float16"

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step."""
        number = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if not (self._float16_region or _has_float16(optimizer)):
            return
        self._tell_if_all_are_zero(optimizer)
        if not is_checked(number):
            return
        if many := self._mostly_zero(optimizer):
            self.session.emit(GradientZeros(parameters=dict(list(many.items())[:MOST_TOLD])))
            for listener in self.on_zeros:
                listener()

    def _mostly_zero(self, optimizer: Optimizer) -> dict[str, Zeros]:
        """The parameters whose gradients are 0 for the most part; waits for the device."""
        found = [(n, p.grad) for n, p in self._of(optimizer) if p.grad is not None and measurable(p.grad)]
        if not found:
            return {}
        with self.position.mute(), torch.no_grad():
            zeros = torch.stack([(g == 0).sum() for _, g in found]).tolist()
        counts = [(name, int(count), g.numel()) for (name, g), count in zip(found, zeros, strict=True)]
        return {name: Zeros(zeros=count, elements=of) for name, count, of in counts if count >= MANY * of}

    def _tell_if_all_are_zero(self, optimizer: Optimizer) -> None:
        """From one step to the next nothing is learned any more. Only on the CPU: elsewhere each step would wait for the device."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        known = [gradient for gradient in gradients if measurable(gradient) and gradient.device.type == "cpu"]
        with self.position.mute(), torch.no_grad():
            dead = bool(known) and len(known) == len(gradients) and not any(map(torch.any, known))
        if dead and not self._dead.get(optimizer, False):
            self.checks.look.look_again()
        self._dead[optimizer] = dead

    def _of(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        known = self.names.parameters()
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                yield known.get(id(parameter), (0, f"param_groups.{number}.{index}"))[1], parameter


def when_scaled(
    names: Iterable[str], gradients: Callable[[float], Sequence[Tensor | None]], scale: float
) -> dict[str, ScaledGradient]:
    """The gradients of one backward pass and of the same one with what it starts from multiplied, by name of the parameter."""
    plain, scaled = gradients(1.0), gradients(scale)
    with torch.no_grad():
        return {
            name: _compared(one, other, scale)
            for name, one, other in zip(names, plain, scaled, strict=True)
            if one is not None and other is not None
        }


def _compared(plain: Tensor, scaled: Tensor, scale: float) -> ScaledGradient:
    wide = scaled.double() / scale
    back = torch.where((plain == 0) & wide.isfinite(), wide.abs(), 0.0)
    return ScaledGradient(
        elements=plain.numel(),
        zeros=int((plain == 0).sum()),
        zeros_scaled=int((scaled.eq(0) | ~scaled.isfinite()).sum()),
        largest=float(back.max()) if back.numel() else 0.0,
    )


def _has_float16(optimizer: Optimizer) -> bool:
    """Whether a parameter of the optimizer is in float16."""
    return any(p.dtype is torch.float16 for group in optimizer.param_groups for p in group["params"])


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


_Key = tuple[int, str]
"""Number of the outermost module, and the dotted name of a parameter in it."""


@dataclass(slots=True)
class _Total:
    """What the checks of one parameter have found so far, in elements."""

    dtype: str
    elements: int
    weights: int
    """Elements of the whole parameter."""
    first: Tensor
    """The compared elements before the first step that was checked."""
    moves: Tensor
    """Which of them move in float32 in one of the steps so far."""
    signs: Tensor
    """Of each, the sum of the signs of its gradients."""
    checks: int = 0
    steady: float = 0.0
    asked: int = 0
    still: int = 0
    wanted: int = 0
    lost: int = 0
    absmax: float = 0.0
    update: float = 0.0
    finite: bool = False


@dataclass(slots=True)
class _Sample:
    """Elements of a parameter before the step, and what the float32 copy makes of them."""

    key: _Key
    parameter: Tensor
    stride: int
    before: Tensor
    copy: nn.Parameter
    state: dict[str, Any] | None = None
    """What the float32 copy's own steps so far have left of the optimizer's state; None where they were not followed from the first on."""
    unseen: Tensor | float = 0.0
    """What the parameter differs from the float32 copy after the steps before, where these were followed."""
    begun: dict[str, Any] = field(default_factory=dict)
    """The optimizer's state before the step, where they were not."""

    @property
    def name(self) -> str:
        """The dotted name, which a parameter of another outermost module may have as well."""
        return self.key[1]

    def missing(self) -> Tensor:
        """What the parameter lacks of the float32 updates so far."""
        return self.unseen + self.copy.detach() - self.now().float()

    def now(self) -> Tensor:
        """The same elements as they are now."""
        return _strided(self.parameter, self.stride)


@dataclass(slots=True)
class _Known:
    """What the checks of one optimizer have found so far."""

    first: int
    """The first step that was checked."""
    totals: dict[_Key, _Total]
    followed: dict[_Key, tuple[dict[str, Any], dict[Any, Any], Tensor]]
    """By parameter, the state of the float32 copy after the last step, what the optimizer's own was then, and what was missing."""
    steps: int = 0
    overshot: bool = False
    told: bool = False
    is_kept: bool | None = None
    """Whether the optimizer's state has held, after each check, what was missing; None where nothing was."""
    tiny: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of updates that are too small to move a weight by rounding: their sum, what the weights moved, and how many moved."""

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
        """The optimizer is about to step."""
        self._samples = []
        if any(isinstance(held, Optimizer) for held in vars(optimizer).values()):
            return  # a wrapper; the optimizer inside tells of itself
        known = self._known.setdefault(optimizer, _Known(self.position.step, {}, {}))
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
            self._step_copies(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped."""
        samples, self._samples = self._samples, []
        if not samples:
            return
        with self.position.mute(), torch.no_grad():
            wider = next((key for sample in samples if (key := _wider_copy(optimizer, sample))), "")
        if wider:
            self._give_up(
                optimizer,
                f"its state holds the weights in a wider dtype ({wider}), in which their updates are not lost",
            )
            return
        known = self._known[optimizer]
        if known.steps < FIRST_CHECKS:
            known.followed = {
                one.key: (one.state, _left(optimizer, one), one.missing()) for one in samples if one.state
            }
        totals = known.totals
        with self.position.mute(), torch.no_grad():
            if (
                known.steps <= FIRST_CHECKS
            ):  # later ones do not follow each other: what is kept by then is of steps that were not seen
                kept = _is_kept(optimizer, samples)
                known.is_kept = kept if known.is_kept is None or kept is False else known.is_kept
            moved = torch.stack(list(map(_moved_by_chance, samples))).sum(0).tolist()
            known.tiny = tuple(a + b for a, b in zip(known.tiny, moved, strict=True))
            counted = torch.stack([_counts(sample, _total_of(sample, totals)) for sample in samples]).tolist()
            if not known.overshot and all(sample.state is not None for sample in samples):
                known.overshot = self._tell_overshoots(optimizer, samples)
        for sample, (wanted, lost, absmax, update, finite, asked, still, steady) in zip(samples, counted, strict=True):
            total = totals[sample.key]
            total.steady = steady
            total.asked, total.still = int(asked), int(still)
            total.wanted += int(wanted)
            total.lost += int(lost)
            total.absmax = max(total.absmax, absmax)
            total.update = max(total.update, update)
            total.finite |= finite > 0
        self._tell(optimizer, known)

    def _step_copies(self, optimizer: Optimizer) -> None:
        """Has the copies make the step, or gives them up."""
        why = self._samples and (_why_not_copied(optimizer) or _step_in_float32(optimizer, self._samples))
        if why:
            self._give_up(optimizer, why)

    def _give_up(self, optimizer: Optimizer, why: str) -> None:
        self._samples = []
        self.session.guard.tell(f"{LOST_UPDATES}{type(optimizer).__name__}", why)

    def _tell_overshoots(self, optimizer: Optimizer, samples: list[_Sample]) -> bool:
        counted = torch.stack([_too_far(sample) for sample in samples]).tolist()
        found = {
            sample.name: OvershotParameter(
                elements=sample.before.numel(),
                overshot=int(many),
                dtype=dtype_name(sample.parameter),
                moved=moved,
                update=update,
            )
            for sample, (many, moved, update) in zip(samples, counted, strict=True)
            if many >= max(ENOUGH_TOO_FAR, MANY_TOO_FAR * sample.before.numel())
        }
        if not found:
            return False
        worst = sorted(found.items(), key=lambda pair: -pair[1].overshot / pair[1].elements)[:MOST_TOLD]
        self.session.emit(
            Overshoots(
                optimizer=type(optimizer).__name__,
                lr=float(optimizer.param_groups[0].get("lr", 0.0)),
                compared=len(samples),
                parameters=dict(worst),
            )
        )
        return True

    def _tell(self, optimizer: Optimizer, known: _Known) -> None:
        totals = known.totals
        stalled = [] if known.adds_up else _stalled(totals)
        if not stalled and not known.told:
            return
        known.told = True  # from now on each check is, so that the last record says what holds in the end
        told = Updates(
            optimizer=type(optimizer).__name__,
            lr=float(optimizer.param_groups[0].get("lr", 0.0)),
            checks=known.steps,
            first_step=known.first,
            wanted=sum(t.wanted for t in totals.values()),
            lost=sum(t.lost for t in totals.values()),
            parameters=dict(stalled[:MOST_TOLD]),
            compared=len(totals),
            finite=sum(t.finite for t in totals.values()),
        )
        self.session.emit(told)

    def _taken(self, optimizer: Optimizer) -> list[_Sample]:
        samples: list[_Sample] = []
        half = _half_parameters(optimizer)
        known = self.names.parameters() if half else {}
        if not _by_element(optimizer) and any(parameter.numel() > SMALL for parameter in half):
            why = f"it may not treat each element by itself, so that parameters of more than {SMALL:,} are left out"
            self.session.guard.tell(f"{LOST_UPDATES}{type(optimizer).__name__}", why)
        for parameter in half:
            stride = _stride(optimizer, parameter)
            if stride and parameter.grad is not None and id(parameter) in known:
                before = _strided(parameter, stride).clone()
                copy = nn.Parameter(before.float())
                copy.grad = _strided(parameter.grad, stride).float()
                samples.append(_Sample(known[id(parameter)], parameter, stride, before, copy))
        return samples


def _stalled(totals: dict[_Key, _Total]) -> list[tuple[str, StalledParameter]]:
    """The parameters that have lost most of their updates, worst first; those of one name in several outermost modules as one."""
    named: defaultdict[str, list[_Total]] = defaultdict(list)
    for (_, name), total in totals.items():
        if total.wanted and total.lost >= MOSTLY * total.wanted:
            named[name].append(total)
    told = [(name, _together(of_name)) for name, of_name in named.items()]
    return sorted(told, key=lambda pair: -pair[1].lost / pair[1].wanted)


def _together(totals: list[_Total]) -> StalledParameter:
    return StalledParameter(
        wanted=sum(t.wanted for t in totals),
        lost=sum(t.lost for t in totals),
        dtype=totals[0].dtype,
        elements=sum(t.elements for t in totals),
        absmax=max(t.absmax for t in totals),
        update=max(t.update for t in totals),
        asked=sum(round(t.asked * t.weights / t.elements) for t in totals),
        still=sum(round(t.still * t.weights / t.elements) for t in totals),
        steady=max(t.steady for t in totals),
        parameters=len(totals),
    )


def _half_parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.dtype in HALF]


def is_checked(number: int) -> bool:
    """Whether the step with this number, from 1, is checked."""
    return number <= FIRST_CHECKS or number.bit_count() == 1


def _stride(optimizer: Optimizer, parameter: Tensor) -> int:
    """Distance of the elements that are compared; 0 for a parameter that is not."""
    gradient = parameter.grad
    if parameter.dtype not in HALF or gradient is None or not parameter.numel():
        return 0
    if not (measurable(parameter) and measurable(gradient) and parameter.is_contiguous()):
        return 0
    if _by_element(optimizer):
        return math.ceil(parameter.numel() / SAMPLED)
    return 1 if parameter.numel() <= SMALL else 0


def _by_element(optimizer: Optimizer) -> bool:
    """Whether the optimizer is known to treat each element by itself, so that a few can stand for all."""
    step = unwrap(type(optimizer).step)
    return step.__module__.startswith(_ELEMENTWISE) and type(optimizer).__name__ not in _NOT_ELEMENTWISE


def _strided(tensor: Tensor, stride: int) -> Tensor:
    flat = tensor.detach().reshape(-1)[::stride]
    return flat if stride > 1 else tensor.detach()


@cache
def _of_every_optimizer() -> frozenset[str]:
    """The attributes that torch gives an optimizer; ``step`` is replaced in it by schedulers of the learning rate."""

    class Bare(Optimizer):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Does nothing."""

    return frozenset(vars(Bare([nn.Parameter(torch.zeros(1))], {}))) | {"step"}


_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def _is_plain(value: Any) -> bool:
    """Whether a copy of it has nothing in common with it: a function of a module keeps nothing between two calls, one with a closure may."""
    if isinstance(value, FunctionType):
        return value.__closure__ is None and not vars(value)
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    if type(value) in (dict, defaultdict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return isinstance(value, _PLAIN)


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    return {name: held for name, held in vars(optimizer).items() if name not in _of_every_optimizer()}


def _has_other_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _why_not_copied(optimizer: Optimizer) -> str:
    """Why no copy of the optimizer may make a step: it would write to what the program's own one holds, or call other ranks. Empty where it may.

    torch's own optimizers keep everything in the state of parameters, of which a copy gets a copy.
    """
    if type(optimizer).__module__.startswith(_ELEMENTWISE):
        return ""
    if _has_other_ranks():
        return "its step may call collectives, so that no copy of it makes a step beside it"
    groups = [optimizer.defaults, *optimizer.param_groups]
    held_by_groups = [(key, held) for group in groups for key, held in group.items() if key != "params"]
    everything = [*_own_attributes(optimizer).items(), *held_by_groups]
    shared = [name for name, held in everything if not _is_plain(held)]
    if not shared:
        return ""
    return f"it holds more than numbers ({shared[0]}), which a copy of it that makes a step would write to"


def _left(optimizer: Optimizer, sample: _Sample) -> dict[Any, Any]:
    """By which it is seen later whether anybody but a step has changed the optimizer's state of the parameter."""
    state = optimizer.state.get(sample.parameter, {})
    return {key: (MemoryRef(one), version_of(one)) if isinstance(one, Tensor) else one for key, one in state.items()}


def _followed_state(
    optimizer: Optimizer,
    sample: _Sample,
    followed: dict[_Key, tuple[dict[str, Any], dict[Any, Any], Tensor]],
    number: int,
) -> dict[str, Any] | None:
    """The state that the copy's own steps so far have left; empty where the optimizer begins, None where its state is not what its steps have left."""
    state = optimizer.state.get(sample.parameter, {})
    if not state and (number == 1 or sample.key in followed):
        return {}  # also where a program has reset it between two steps
    if sample.key not in followed:
        return None
    copied, left, _ = followed[sample.key]
    return copied if state.keys() == left.keys() and all(_is_as_left(state[key], left[key]) for key in left) else None


def _is_as_left(value: Any, left: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(left, tuple) and left[0].is_of(value) and left[1] == version_of(value)
    return _is_plain(value) and bool(value == left)


def _step_in_float32(optimizer: Optimizer, samples: list[_Sample]) -> str:
    """Lets a copy of the optimizer, with a float32 copy of its state, step on the copies; why it could not, or empty."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    groups = [{key: held for key, held in group.items() if key != "params"} for group in optimizer.param_groups]
    if not type(optimizer).__module__.startswith(_ELEMENTWISE):
        own = {**_own_attributes(optimizer), "defaults": optimizer.defaults}
        own, groups = deepcopy((own, groups))  # together, as the groups hold what the defaults do
        twin.__dict__.update(own)
    copies = {id(sample.parameter): sample for sample in samples}
    twin.param_groups = [
        {**group, "params": [copies[id(p)].copy for p in of["params"] if id(p) in copies]}
        for group, of in zip(groups, optimizer.param_groups, strict=True)
    ]
    twin.state = defaultdict(dict)
    for sample in samples:
        begun = optimizer.state.get(sample.parameter, {})
        if begun and not sample.state:
            sample.state = None  # begun before it was followed
            sample.begun = _state_in_float32(begun, sample) or {}
        state = sample.state if sample.state else _state_in_float32(begun, sample)
        if state is None:
            return "its state is not that of single elements, or cannot be read"
        if state:
            twin.state[sample.copy] = state
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    # An optimizer may want a closure, say: then nothing is claimed about it.
    with contained() as trial, torch.random.fork_rng(devices=devices, enabled=not _by_element(optimizer)):
        unwrap(type(optimizer).step)(twin)
    for sample in samples:
        sample.state = twin.state.get(sample.copy) if sample.state is not None else None
    return "" if trial.error is None else f"no copy of it can make a step by itself ({type(trial.error).__name__})"


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


def _state_in_float32(state: dict[str, Any], sample: _Sample) -> dict[str, Any] | None:
    """A copy of the state of one parameter that belongs to the sampled elements; None for state that has no such part."""
    copied: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            if not isinstance(value, (int, float, bool, str, type(None))):
                return None
            copied[key] = value
        elif value.shape == sample.parameter.shape and value.numel() > 1:
            if not measurable(value):
                return None  # quantised state
            taken = _strided(value, sample.stride)
            copied[key] = taken.float() if value.dtype in HALF else taken.clone()
        elif value.numel() <= 1:  # a count of steps, or what an optimizer keeps of a parameter of one element
            copied[key] = value.float() if value.dtype in HALF else value.clone()
        else:
            return None
    return copied


def _total_of(sample: _Sample, totals: dict[_Key, _Total]) -> _Total:
    """What is known of the parameter; begun anew where other elements of it are compared than before."""
    known = totals.get(sample.key)
    if known is None or known.first.shape != sample.before.shape:
        known = totals[sample.key] = _Total(
            dtype=dtype_name(sample.parameter),
            elements=sample.before.numel(),
            weights=sample.parameter.numel(),
            first=sample.before,
            moves=torch.zeros_like(sample.before, dtype=torch.bool),
            signs=torch.zeros_like(sample.before),
        )
    return known


def _counts(sample: _Sample, total: _Total) -> Tensor:
    """Elements that move in float32, those of them that did not move, largest finite weight and update, elements with a finite update.

    Then finite elements that have moved in float32 in any step so far, those of them that are what they were before the first one, and how much the
    signs of the gradients agree.
    """
    before = sample.before.float()
    update = sample.copy.detach() - before
    wanted = update.ne(0) & update.isfinite()
    lost = wanted & sample.now().eq(sample.before)
    largest = torch.where(wanted, update.abs(), 0.0).max()
    weight = torch.where(before.isfinite(), before.abs(), 0.0).max()
    total.moves |= wanted
    now = sample.now()
    asked = total.moves & now.isfinite()  # NaN is another failure than weights that stand still
    still = asked & now.eq(total.first)
    if sample.copy.grad is not None:
        total.checks += 1
        total.signs += sample.copy.grad.sign().nan_to_num().to(total.signs.dtype)
    steady = total.signs.float().abs().mean() / max(total.checks, 1)
    numbers = (wanted.sum(), lost.sum(), weight, largest, update.isfinite().sum(), asked.sum(), still.sum(), steady)
    return torch.stack(
        [number.double().cpu() if number.device.type == "cpu" else number.double() for number in numbers]
    )


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
    asked, *found = torch.stack([torch.stack(many).sum() for many in (missing, *kept.values())]).tolist()
    return max(found, default=0.0) >= MOSTLY_NEAR * asked if asked else None


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
