"""Gradients that float16 flushes to zero: counted before optimizer steps, and compared with those of a scaled loss; gradients
that are used while they carry the loss scale: clipped before ``unscale_``, scaled twice, stepped without the scaler.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf, log2
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.optim import Optimizer

from dtypedoctor._torch_private import gradient_dtype, register_own, schema_of, sequence_number, version_of
from dtypedoctor.instrument.budget import is_checked
from dtypedoctor.instrument.frames import Line, line_of
from dtypedoctor.instrument.silent.observer import Observer, named_parameters_of, parameters_of
from dtypedoctor.instrument.silent.policies import nodes_behind
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.records.execution import AutocastRegion
from dtypedoctor.trace.records.silent import (
    CLIPPED,
    STEPPED,
    TWICE,
    FlushedGradient,
    GradientZeros,
    ScaledGradient,
    ScaledUse,
    Zeros,
)

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
                    self._hooks.append(register_own(node.register_hook, look))

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
        with self.position.aside():
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
        with self.position.aside():
            zeros = torch.stack([(gradient == 0).sum() for _, gradient in gradients]).tolist()
        counts = [
            (name, int(count), gradient.numel()) for (name, gradient), count in zip(gradients, zeros, strict=True)
        ]
        return {name: Zeros(zeros=count, elements=of) for name, count, of in counts if count >= MANY * of}

    def _tell_if_all_are_zero(self, optimizer: Optimizer, gradients: list[Tensor]) -> None:
        """From one step to the next nothing is learned any more. Only on the CPU: elsewhere each step would wait for the device."""
        known = [gradient for gradient in gradients if measurable(gradient) and gradient.device.type == "cpu"]
        with self.position.aside():
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


TINY = 1e-2
"""Limits on gradients below this, once the scale is taken off, are no limits that somebody has chosen."""
SAME = 1e-3
"""Relative difference of norms that a limit has set to the same value."""
CHANGED, STEADIER = 1e-6, 8
"""The least that two factors differ by where each has brought another norm to the same limit, and how much more than those limits differ: a training
that stands still, which a wrong limit makes it do, has nearly the same norm in each step."""
FIRST = 64
"""Backward passes from a scaled loss after which it is known how a program uses its gradients."""
MOST_NODES = 16
"""Autograd nodes between a scaled loss and what a backward pass begins from."""

_MULTIPLIES = frozenset({"mul_", "_foreach_mul_"})
_BOUNDS = frozenset({"clamp_", "clamp_min_", "clamp_max_", "_foreach_clamp_min_", "_foreach_clamp_max_"})


@dataclass(slots=True)
class _Pass:
    """The gradients that a backward pass from a scaled loss has left.

    Attributes:
        scaled, loss: the loss with the scale and without.
        owners: by address of a gradient, the parameters that this pass has given it to.
        line, name: of the first operator that has written to one of them since.
        factor: what it multiplied by.
        by_hand: whether something was done that may have taken the scale off.
    """

    scaled: Tensor
    loss: Tensor
    owners: dict[int, Tensor]
    line: Line | None = None
    name: str = ""
    factor: Any = None
    by_hand: bool = False

    def note(self, name: str, factor: Any) -> None:
        """An operator is about to write to one of the gradients."""
        if name not in _MULTIPLIES | _BOUNDS:
            self.by_hand = True
        elif not self.name:
            self.line, self.name = line_of(sys._getframe()), name
            self.factor = factor.detach().clone() if isinstance(factor, Tensor) else factor

    @property
    def scale(self) -> float:
        """The factor between the two; to read it waits for a device."""
        one, other = self.scaled.float().sum(), self.loss.float().sum()
        return float(one / other) if bool(other != 0) else 0.0


class ScaleCheck(Observer):
    """Writes a :class:`ScaledUse` for a use of gradients that expects the true ones and gets them times the loss scale."""

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._scaled: deque[int] = deque(maxlen=16)
        """Numbers of the autograd nodes that have scaled a loss."""
        self._last: _Pass | None = None
        self._versions: dict[int, int] = {}
        self._pass: _Pass | None = None
        self._passes = 0
        self._limits: dict[str, list[_Limit]] = {}

    def scaled(self, scaled: Tensor, loss: Tensor) -> None:
        """A gradient scaler has multiplied ``loss``."""
        if self._passes >= FIRST:
            return
        self._last = _Pass(scaled.detach(), loss.detach(), {})
        if self._is_scaled(loss):
            self._tell(TWICE, line_of(sys._getframe()), self._last, 0.0)
        if scaled.grad_fn is not None:
            self._scaled.append(sequence_number(scaled.grad_fn))

    def before_backward(self, tensors: list[Tensor]) -> None:
        """A backward pass begins: of a scaled loss it is followed."""
        self._pass = None
        self._versions = {}
        if self._passes >= FIRST or not any(map(self._is_scaled, tensors)):
            return
        self._passes += 1
        self._versions = {id(p): version_of(p.grad) for p in self._parameters() if p.grad is not None}
        self._pass, self._last = self._last, None

    def after_backward(self) -> None:
        """It has ended."""
        if self._pass is not None:
            left = [
                p for p in self._parameters() if p.grad is not None and self._versions.get(id(p)) != version_of(p.grad)
            ]
            self._pass.owners = {p.grad.data_ptr(): p for p in left if p.grad is not None and measurable(p.grad)}

    def writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator outside of modules is about to write to its operands."""
        if self._pass is None or not self._pass.owners or not args:
            return
        written = args[0] if isinstance(args[0], list | tuple) else args[:1]
        if any(isinstance(t, Tensor) and t.data_ptr() in self._pass.owners for t in written):
            self._pass.note(schema_of(func).name.removeprefix("aten::"), args[1] if len(args) > 1 else None)

    def before_unscale(self, scaler: Any, optimizer: Optimizer) -> None:
        """A gradient scaler is about to take the scale off the gradients of ``optimizer``."""
        self._used(optimizer)
        self._pass = None

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step."""
        if self.checks.in_scaler() or self._pass is None:
            return
        done, self._pass = self._pass, None
        mine = {id(p) for p in parameters_of(optimizer)}
        if not done.name and not done.by_hand and done.owners and mine >= {id(p) for p in done.owners.values()}:
            self._tell(STEPPED, line_of(sys._getframe()), done, 0.0)

    def _used(self, optimizer: Optimizer) -> None:
        """Judges what was done to the gradients while they were scaled."""
        done = self._pass
        if done is None or not done.name or done.by_hand:
            return
        mine = {id(p) for p in parameters_of(optimizer)}
        gradients = [p.grad for p in done.owners.values() if p.grad is not None and id(p) in mine]
        if not gradients:
            return
        with self.session.position.aside():
            limit, factor = _limit_of(done, gradients)
            if 0.0 < limit < TINY * done.scale:
                self._limited(done, limit, factor)

    def _limited(self, done: _Pass, limit: float, factor: float) -> None:
        known = self._limits.setdefault("" if done.line is None else done.line.source, [])
        known.append(_Limit(limit, factor, self.session.position.moment[:2]))
        if done.name in _BOUNDS or _is_a_limit(known):
            first = next(one for one in known if one.is_as(known[-1]))  # it takes several to tell clipping
            self._tell(CLIPPED, done.line, done, limit, at=first.at, phase="optimizer")

    def _tell(self, use: str, line: Line | None, of: _Pass, limit: float, **when: Any) -> None:
        source = "" if line is None else line.source
        with self.session.position.aside():
            scale = of.scale
        self.session.once(ScaledUse(use=use, source=source, scale=scale, limit=limit), (use, source), **when)

    def _parameters(self) -> Iterable[Tensor]:
        return [p for _, _, p, _, is_buffer in self.session.names.tensors() if not is_buffer and p.requires_grad]

    def _is_scaled(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a scaled loss, or was computed from one by a few operators."""
        return bool(self._scaled) and any(
            sequence_number(node) in self._scaled for node in islice(nodes_behind([tensor]), MOST_NODES)
        )


def _limit_of(done: _Pass, gradients: list[Tensor]) -> tuple[float, float]:
    """What the gradients were limited to: their norm, or their largest magnitude; and the factor that did it."""
    if done.name in _BOUNDS:
        bound = done.factor if isinstance(done.factor, int | float) else 0.0
        return abs(float(bound)), 1.0
    factor = float(done.factor) if isinstance(done.factor, int | float) or done.factor.numel() == 1 else 0.0
    norms = torch.stack([gradient.float().norm().cpu() for gradient in gradients])
    return (float(norms.norm()), factor) if 0.0 < factor < 1.0 else (0.0, factor)


class _Limit(NamedTuple):
    """What gradients were limited to, by which factor, and in which step and call."""

    limit: float
    factor: float
    at: tuple[int, int]

    def apart(self, other: "_Limit") -> float:
        """How far this limit is from that of ``other``, relative to that."""
        return abs(self.limit / other.limit - 1.0)

    def is_as(self, other: "_Limit") -> bool:
        """Whether the two limits are the same."""
        return self.apart(other) <= SAME


def _is_a_limit(known: list[_Limit]) -> bool:
    """Whether several factors have brought gradients to one norm, which only clipping does."""
    last = known[-1]
    same = (one for one in known[:-1] if one.is_as(last))
    return any(abs(one.factor / last.factor - 1.0) > max(CHANGED, STEADIER * one.apart(last)) for one in same)
