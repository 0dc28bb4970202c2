"""Gradients that are used while they carry the loss scale: clipped before ``unscale_``, scaled twice, stepped without the scaler."""

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dtypedoctor._torch_private import schema_of, sequence_number, version_of
from dtypedoctor.instrument.frames import Line, line_of
from dtypedoctor.instrument.silent.observer import Observer, parameters_of
from dtypedoctor.instrument.silent.policies import nodes_behind
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.records.silent import CLIPPED, STEPPED, TWICE, ScaledUse

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

TINY = 1e-2
"""Limits on gradients below this, once the scale is taken off, are no limits that somebody has chosen."""
SAME = 1e-3
"""Relative difference of norms that a limit has set to the same value."""
CHANGED = 1e-2
"""The least that two factors differ by where each has brought another norm to the same limit."""
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
        self._limits: dict[str, list[tuple[float, float]]] = {}

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
        with self.session.position.mute(), torch.no_grad():
            limit, factor = _limit_of(done, gradients)
            if 0.0 < limit < TINY * done.scale:
                self._limited(done, limit, factor)

    def _limited(self, done: _Pass, limit: float, factor: float) -> None:
        known = self._limits.setdefault("" if done.line is None else done.line.source, [])
        known.append((limit, factor))
        if done.name in _BOUNDS or _is_a_limit(known):
            self._tell(CLIPPED, done.line, done, limit)

    def _tell(self, use: str, line: Line | None, of: _Pass, limit: float) -> None:
        source = "" if line is None else line.source
        with self.session.position.mute(), torch.no_grad():
            scale = of.scale
        self.session.once(ScaledUse(use=use, source=source, scale=scale, limit=limit), (use, source))

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


def _is_a_limit(known: list[tuple[float, float]]) -> bool:
    """Whether several factors have brought gradients to one norm, which only clipping does."""
    one = known[-1]
    return any(
        abs(limit - one[0]) <= SAME * one[0] and abs(factor - one[1]) > CHANGED * one[1] for limit, factor in known[:-1]
    )
