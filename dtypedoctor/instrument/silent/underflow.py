"""Gradients that float16 flushes to zero: counted before optimizer steps, and compared with those of a scaled loss."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from dtypedoctor.instrument.operators import Arguments
from dtypedoctor.instrument.readings import is_checked
from dtypedoctor.instrument.silent.observer import Observer, named_parameters_of, parameters_of
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.records.execution import AutocastRegion
from dtypedoctor.trace.records.silent import FlushedGradient, GradientZeros, ScaledGradient, Zeros

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

SCALE = 32768.0
"""The largest power of two that float16 holds; half of what a gradient scaler begins with."""
MANY = 0.5
"""Share of zeros in a parameter's gradient from which on it is worth a second look."""
MOST_TOLD = 40


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
        self._flushed: FlushedGradient | None = None

    def follows(self, func: Any) -> bool:
        """Whether an operator casts."""
        return str(func) == "aten._to_copy.default"

    def ran(self, func: Any, arguments: Arguments, result: Any) -> None:
        """A cast has run outside of modules: where it leaves nothing of a gradient, no call that is made again with a larger one shows it."""
        if self._flushed is not None or result.dtype is not torch.float16 or self.position.phase != "backward":
            return
        gradient = arguments[0][0]
        if gradient.element_size() <= result.element_size() or not (
            measurable(gradient) and self.session.readings.may_read(result)
        ):
            return
        with self.position.mute(), torch.no_grad():
            absmax = float(gradient.abs().max()) if gradient.numel() else 0.0
            if 0 < absmax < torch.inf and not result.any():
                revived = int((gradient * SCALE).half().count_nonzero())
                source, elements = self.here()[0], result.numel()
                told = FlushedGradient(source=source, elements=elements, absmax=absmax, scale=SCALE, revived=revived)
                self._flushed = told if revived else None

    def entered(self, region: AutocastRegion) -> None:
        """An autocast region is entered."""
        self._float16_region = self._float16_region or region.dtype == "float16"

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step."""
        number = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        parameters = parameters_of(optimizer)
        if not (self._float16_region or any(p.dtype is torch.float16 for p in parameters)):
            return
        self._tell_if_all_are_zero(optimizer, [p.grad for p in parameters if p.grad is not None])
        # to count the zeros waits for the device
        many = self._mostly_zero(optimizer) if is_checked(number) else {}
        if many:
            self.session.emit(GradientZeros(parameters=dict(list(many.items())[:MOST_TOLD])))
            for listener in self.on_zeros:
                listener()

    def _mostly_zero(self, optimizer: Optimizer) -> dict[str, Zeros]:
        """The gradients that are 0 for the most part, by name of the parameter."""
        named = named_parameters_of(optimizer, self.names)
        gradients = [(name, p.grad) for name, p in named if p.grad is not None and measurable(p.grad)]
        if not gradients:
            return {}
        with self.position.mute(), torch.no_grad():
            zeros = torch.stack([(gradient == 0).sum() for _, gradient in gradients]).tolist()
        counts = [
            (name, int(count), gradient.numel()) for (name, gradient), count in zip(gradients, zeros, strict=True)
        ]
        return {name: Zeros(zeros=count, elements=of) for name, count, of in counts if count >= MANY * of}

    def _tell_if_all_are_zero(self, optimizer: Optimizer, gradients: list[Tensor]) -> None:
        """From one step to the next nothing is learned any more. Only on the CPU: elsewhere each step would wait for the device."""
        known = [gradient for gradient in gradients if measurable(gradient) and gradient.device.type == "cpu"]
        with self.position.mute(), torch.no_grad():
            dead = bool(known) and len(known) == len(gradients) and not any(map(torch.any, known))
        if dead and not self._dead.get(optimizer, False):
            self.checks.look.look_again()
        if dead and self._flushed is not None:
            self.session.once(self._flushed, ())
        self._flushed = None
        self._dead[optimizer] = dead


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
