"""Gradients that float16 flushes to zero: counted before optimizer steps, and compared with those of a scaled loss."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf, log2
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.optim import Optimizer

from dtypedoctor._torch_private import gradient_dtype
from dtypedoctor.instrument.readings import is_checked
from dtypedoctor.instrument.silent.observer import Observer, named_parameters_of, parameters_of
from dtypedoctor.instrument.silent.policies import nodes_behind
from dtypedoctor.instrument.statistics import measurable, out_of_their_sight
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
        self._passes = 0
        self._hooks: list[Any] = []
        self._flushed: FlushedGradient | None = None

    def before_backward(self, tensors: list[Tensor]) -> None:
        """A backward pass begins: looks where its gradient becomes float16. Where nothing is left of it, no call that is made again shows it."""
        if self.position.backward_depth:
            return
        self._passes += 1
        for node in nodes_behind(tensors) if is_checked(self._passes) else ():
            for place, (behind, index) in enumerate(node.next_functions):
                if behind is not None and _narrows(node, behind, index):
                    look = self.session.guard.shield(
                        partial(self._handed_on, node, place), "gradients that become float16"
                    )
                    self._hooks.append(node.register_hook(look))

    def after_backward(self) -> None:
        """It has ended."""
        while self._hooks:
            self._hooks.pop().remove()

    def _handed_on(self, node: Any, place: int, made: Sequence[Tensor | None], got: Sequence[Tensor | None]) -> None:
        """An autograd node has made a gradient that goes on in float16."""
        gradient, upstream, may_read = made[place], got[0], self.session.readings.may_read
        if (
            gradient is None
            or upstream is None
            or not (measurable(gradient) and measurable(upstream) and may_read(gradient))
        ):
            return
        with self.position.mute(), out_of_their_sight(), torch.no_grad():
            absmax = 0.0 if gradient.half().any() else float(upstream.abs().max())
            if not 0 < absmax < inf:
                return
            scale = 2.0 ** -round(log2(absmax))
            revived = int(_made_of(node, place, gradient, upstream, scale).half().count_nonzero())
            elements = gradient.numel()
        if revived and self._flushed is None:
            self._flushed = FlushedGradient(
                source=self.here()[0], elements=elements, absmax=absmax, scale=scale, revived=revived
            )

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


def _narrows(node: Any, behind: Any, index: int) -> bool:
    """Whether a gradient that a node gets in a wider dtype goes to the node behind it in float16."""
    return gradient_dtype(behind, index) is torch.float16 and gradient_dtype(node) in (torch.float32, torch.float64)


def _made_of(node: Any, place: int, gradient: Tensor, upstream: Tensor, scale: float) -> Tensor:
    """The gradient that a node makes of a multiplied one, in which it is linear; no code of the program runs twice."""
    if gradient.dtype is not torch.float16 or isinstance(node, FunctionCtx):
        return gradient * scale
    again = node(upstream * scale)
    made: Tensor = again[place] if isinstance(again, tuple) else again
    return made


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
