"""Training that half precision is too coarse for: gradients that float16 flushes to zero, updates that weights are too coarse to feel."""

import inspect
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.interruptions import contained, is_interruption
from dtypedoctor.redaction.messages import elided
from dtypedoctor.trace.records.execution import AutocastRegion
from dtypedoctor.trace.records.silent import (
    GradientZeros,
    ScaledBackward,
    ScaledGradient,
    StalledParameter,
    Updates,
    Zeros,
)
from dtypedoctor.values import dataclass

SCALE = 32768.0
"""The largest power of two that float16 holds; half of what a gradient scaler begins with."""
MANY = 0.5
"""Share of zeros in a parameter's gradient from which on it is worth a second look."""


class GradientCheck:
    """Counts zeros in gradients where float16 is at work.

    Zeros alone prove nothing: tokens that do not occur, ReLU and dropout give them too. The first pass only counts them; where
    there are many, the second pass multiplies the same loss by 32768 and looks which of them come back.

    Before an optimizer step it writes a :class:`GradientZeros`, where a gradient is zero for the most part; :meth:`scaled_backward` writes
    a :class:`ScaledBackward`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names, self._position = session.names, session.position
        self._float16_region = False
        self._steps: dict[int, int] = {}

    def entered(self, region: AutocastRegion) -> None:
        """An autocast region is entered."""
        self._float16_region = self._float16_region or region.dtype == "float16"

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step."""
        number = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if not is_checked(number):
            return
        if not (self._float16_region or _has_float16(optimizer)):
            return
        found = self._gradients(optimizer)
        if not found:
            return
        with self._position.mute(), torch.no_grad():
            zeros = torch.stack([(g == 0).sum() for _, g in found]).tolist()
        counts = [(name, int(count), g.numel()) for (name, g), count in zip(found, zeros, strict=True)]
        many = {name: Zeros(zeros=count, elements=of) for name, count, of in counts if count >= MANY * of}
        if many:
            self._session.emit(GradientZeros(parameters=dict(list(many.items())[:MOST_TOLD])))

    def _gradients(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        return [(n, p.grad) for n, p in self._of(optimizer) if p.grad is not None and measurable(p.grad)]

    def scaled_backward(self, tensors: list[Tensor]) -> None:
        """A backward pass is about to begin: computes its gradients twice beside it, of the loss and of the scaled loss."""
        losses = [t for t in tensors if t.requires_grad and t.numel() == 1]
        wanted = [(n, p) for _, n, p, _, is_buffer in self._names.tensors() if not is_buffer and p.requires_grad]
        if not losses or not wanted:
            return
        parameters = [p for _, p in wanted]
        try:
            with self._position.mute(), torch.random.fork_rng(enabled=True):
                plain = _gradients(losses, parameters, 1.0)
                scaled = _gradients(losses, parameters, SCALE)
        except RuntimeError as error:  # a graph that can be walked only once, say
            if is_interruption(error):
                raise
            self._session.emit(ScaledBackward(scale=SCALE, error=elided(str(error))[:200]))
            return
        with self._position.mute(), torch.no_grad():
            told = {
                name: _compared(one, other)
                for (name, _), one, other in zip(wanted, plain, scaled, strict=True)
                if one is not None and other is not None
            }
        self._session.emit(ScaledBackward(scale=SCALE, parameters=told))

    def _of(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        known = self._names.parameters()
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                yield known.get(id(parameter), (0, f"param_groups.{number}.{index}"))[1], parameter


def _gradients(losses: list[Tensor], parameters: list[Tensor], scale: float) -> tuple[Tensor | None, ...]:
    starts = [torch.full_like(loss, scale) for loss in losses]
    return torch.autograd.grad(losses, parameters, starts, retain_graph=True, allow_unused=True)


def _compared(plain: Tensor, scaled: Tensor) -> ScaledGradient:
    wide = scaled.double() / SCALE
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


HALF = (torch.float16, torch.bfloat16)
SAMPLED = 4096
"""Elements of a parameter that are compared."""
SMALL = 65536
"""Largest parameter of which all elements are compared where the optimizer may not treat each element by itself."""
FIRST_CHECKS = 4
"""The steps that are checked are 1 to 4, and then each power of two."""
MOSTLY = 0.5
"""Share of lost updates from which on a parameter is worth telling of."""
MOST_TOLD = 40

_ELEMENTWISE = "torch.optim."
_NOT_ELEMENTWISE = frozenset({"Adafactor", "Muon", "LBFGS", "SparseAdam"})


@dataclass(slots=True)
class _Total:
    """What the checks of one parameter have found so far, in elements."""

    dtype: str
    elements: int
    wanted: int = 0
    lost: int = 0
    absmax: float = 0.0
    update: float = 0.0
    finite: bool = False


@dataclass(slots=True)
class _Sample:
    """Elements of a parameter before the step, and what the float32 copy makes of them."""

    name: str
    parameter: Tensor
    stride: int
    before: Tensor
    copy: nn.Parameter

    def now(self) -> Tensor:
        """The same elements as they are now."""
        return _strided(self.parameter, self.stride)


class UpdateCheck:
    """Writes an :class:`Updates` after each checked step in which parameters lose most of their updates.

    A few thousand elements of each half-precision parameter are compared with themselves around a step, and the
    same optimizer takes the same step on a float32 copy of these elements, of their gradients and of its own state. What moves
    there and not here is lost to rounding.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._names, self._position = session.names, session.position
        self._steps: dict[int, int] = {}
        self._first: dict[int, int] = {}
        self._totals: dict[int, dict[str, _Total]] = {}
        self._samples: list[_Sample] = []

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step."""
        self._samples = []
        if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
            return  # a wrapper; the optimizer inside tells of itself
        number = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if not is_checked(number):
            return
        self._first.setdefault(id(optimizer), self._position.step)
        with self._position.mute(), torch.no_grad():
            self._samples = self._taken(optimizer)
            if self._samples and not _step_in_float32(optimizer, self._samples):
                self._samples = []

    def after_step(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped."""
        samples, self._samples = self._samples, []
        if not samples:
            return
        with self._position.mute(), torch.no_grad():
            counted = torch.stack([_counts(sample) for sample in samples]).tolist()
        totals = self._totals.setdefault(id(optimizer), {})
        for sample, (wanted, lost, absmax, update, finite) in zip(samples, counted, strict=True):
            total = totals.setdefault(sample.name, _Total(dtype_name(sample.parameter), sample.before.numel()))
            total.wanted += int(wanted)
            total.lost += int(lost)
            total.absmax = max(total.absmax, absmax)
            total.update = max(total.update, update)
            total.finite |= finite > 0
        self._tell(optimizer, totals)

    def _tell(self, optimizer: Optimizer, totals: dict[str, _Total]) -> None:
        stalled = [(name, t) for name, t in totals.items() if t.wanted and t.lost >= MOSTLY * t.wanted]
        if not stalled:
            return
        stalled.sort(key=lambda pair: -pair[1].lost / pair[1].wanted)
        told = Updates(
            optimizer=type(optimizer).__name__,
            lr=float(optimizer.param_groups[0].get("lr", 0.0)),
            checks=self._steps[id(optimizer)],
            first_step=self._first[id(optimizer)],
            wanted=sum(t.wanted for t in totals.values()),
            lost=sum(t.lost for t in totals.values()),
            parameters={
                name: StalledParameter(
                    wanted=t.wanted, lost=t.lost, dtype=t.dtype, elements=t.elements, absmax=t.absmax, update=t.update
                )
                for name, t in stalled[:MOST_TOLD]
            },
            compared=len(totals),
            finite=sum(t.finite for t in totals.values()),
        )
        self._session.emit(told)

    def _taken(self, optimizer: Optimizer) -> list[_Sample]:
        samples: list[_Sample] = []
        if not any(p.dtype in HALF for group in optimizer.param_groups for p in group["params"]):
            return samples
        known = self._names.parameters()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                stride = _stride(optimizer, parameter)
                if stride and id(parameter) in known:
                    before = _strided(parameter, stride).clone()
                    copy = nn.Parameter(before.float())
                    copy.grad = _strided(parameter.grad, stride).float()
                    samples.append(_Sample(known[id(parameter)][1], parameter, stride, before, copy))
        return samples


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
    step = inspect.unwrap(type(optimizer).step)
    return step.__module__.startswith(_ELEMENTWISE) and type(optimizer).__name__ not in _NOT_ELEMENTWISE


def _strided(tensor: Tensor, stride: int) -> Tensor:
    flat = tensor.detach().reshape(-1)[::stride]
    return flat if stride > 1 else tensor.detach()


def _step_in_float32(optimizer: Optimizer, samples: list[_Sample]) -> bool:
    """Lets a copy of the optimizer, with a float32 copy of its state, step on the copies; False where it cannot."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    copies = {id(sample.parameter): sample for sample in samples}
    twin.param_groups = [
        {**group, "params": [copies[id(p)].copy for p in group["params"] if id(p) in copies]}
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    for sample in samples:
        state = _state_in_float32(optimizer.state.get(sample.parameter, {}), sample)
        if state is None:
            return False
        if state:
            twin.state[sample.copy] = state
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    # An optimizer may want a closure, say: then nothing is claimed about it.
    with contained() as trial, torch.random.fork_rng(devices=devices, enabled=not _by_element(optimizer)):
        inspect.unwrap(type(optimizer).step)(twin)
    return trial.error is None


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


def _counts(sample: _Sample) -> Tensor:
    """Elements that move in float32, those of them that did not move, largest finite weight and update, elements with a finite update."""
    before = sample.before.float()
    update = sample.copy.detach() - before
    wanted = update.ne(0) & update.isfinite()
    lost = wanted & sample.now().eq(sample.before)
    largest = torch.where(wanted, update.abs(), 0.0).max()
    weight = torch.where(before.isfinite(), before.abs(), 0.0).max()
    numbers = (wanted.sum(), lost.sum(), weight, largest, update.isfinite().sum())
    return torch.stack(
        [number.double().cpu() if number.device.type == "cpu" else number.double() for number in numbers]
    )
