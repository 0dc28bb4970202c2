"""Gradients that float16 has flushed to zero.

Zeros alone prove nothing: tokens that do not occur, ReLU and dropout give them too. The first pass only counts them; where
there are many, the second pass multiplies the same loss by 32768 and looks which of them come back.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from dtypedoctor.instrument.autocast import AutocastLog
from dtypedoctor.instrument.naming import Names
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.silent.notes import Notes
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.interruptions import is_interruption
from dtypedoctor.redaction.messages import elided
from dtypedoctor.trace.records.autocast import AutocastRegion
from dtypedoctor.trace.records.silent import GradientZeros, ScaledBackward, ScaledGradient, Zeros

SCALE = 32768.0
"""The largest power of two that float16 holds; half of what a gradient scaler begins with."""
MANY = 0.5
"""Share of zeros in a parameter's gradient from which on it is worth a second look."""
FIRST_CHECKS = 4
"""The steps that are checked are 1 to 4, and then each power of two."""
MOST_TOLD = 40


class GradientCheck:
    """Counts zeros in gradients where float16 is at work.

    Before an optimizer step it writes a :class:`GradientZeros`, where a gradient is zero for the most part; :meth:`scaled_backward` writes
    a :class:`ScaledBackward`.
    """

    def __init__(self, notes: Notes, names: Names, position: Position, autocast: AutocastLog) -> None:
        self._notes = notes
        self._names = names
        self._position = position
        self._float16_region = False
        self._steps: dict[int, int] = {}
        autocast.entered.append(self._note_region)

    def _note_region(self, region: AutocastRegion) -> None:
        self._float16_region = self._float16_region or region.dtype == "float16"

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step."""
        number = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        power_of_two = number & (number - 1) == 0
        if number > FIRST_CHECKS and not power_of_two:
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
            self._notes.write(GradientZeros(parameters=dict(list(many.items())[:MOST_TOLD])))

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
            self._notes.write(ScaledBackward(scale=SCALE, error=elided(str(error))[:200]))
            return
        with self._position.mute(), torch.no_grad():
            told = {
                name: _compared(one, other)
                for (name, _), one, other in zip(wanted, plain, scaled, strict=True)
                if one is not None and other is not None
            }
        self._notes.write(ScaledBackward(scale=SCALE, parameters=told))

    def _of(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        known = {id(tensor): name for _, name, tensor, _, is_buffer in self._names.tensors() if not is_buffer}
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                yield known.get(id(parameter), f"param_groups.{number}.{index}"), parameter


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
