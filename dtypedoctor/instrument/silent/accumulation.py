"""Gradients that are added up in half precision over many backward passes, until what is added is rounded away.

Autograd adds to ``parameter.grad`` where no operator mode sees it. A hook on the node that does so is shown each gradient before it is added; a few
elements of a few parameters are added up in float64 beside it, in the first steps.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtypedoctor.dtypes import DTYPES
from dtypedoctor.instrument.frames import Line, line_of
from dtypedoctor.instrument.gradients import leaves_of
from dtypedoctor.instrument.naming import short_name
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.silent.shadows import DEVIATIONS, FEWEST, digits_lost
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.records.silent import RoundedSum

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from dtypedoctor.instrument.silent.checks import Checks

FIRST_STEPS, PARAMETERS, ELEMENTS = 3, 4, 256
"""Optimizer steps in which gradients are followed, parameters that are followed, and elements of each."""


@dataclass(slots=True)
class _Gradient:
    """What a gradient is, and what it would be, at some elements.

    Attributes:
        exact: the sum in float64.
        now: the gradient as the last backward pass has left it.
        added: gradients since it began.
        node: that adds to it, which would go with the graph, and its hook with it.
        handle: takes the hook off.
    """

    parameter: Tensor
    exact: Tensor
    now: Tensor
    node: Any
    handle: Any = None
    added: int = 1


class AccumulatedGradients(Observer):
    """Writes a :class:`RoundedSum` where the gradients of many backward passes have lost what the later ones add."""

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._followed: dict[int, _Gradient] = {}
        self._line: Line | None = None
        self._told = 0

    def before_backward(self, tensors: list[Tensor]) -> None:
        """A backward pass begins: follows half-precision gradients that are there already, and will be added to."""
        if self.position.backward_depth or self.position.step > FIRST_STEPS:
            return
        self._line = line_of(sys._getframe())
        if self._followed:
            return
        with self.position.mute(), torch.no_grad():
            for leaf in leaves_of(tensors):
                if len(self._followed) < PARAMETERS and _is_added_to(leaf) and self.session.readings.affords(leaf):
                    self._follow(leaf)

    def _follow(self, leaf: Tensor) -> None:
        node = torch.autograd.graph.get_gradient_edge(leaf).node
        now = _part(leaf.grad)  # type: ignore[arg-type]
        gradient = _Gradient(leaf, now.double(), now, node)

        def added(gradients: Sequence[Tensor]) -> None:
            if gradients[0] is not None and not self.position.muted:
                with self.position.mute(), torch.no_grad():
                    gradient.exact += _part(gradients[0]).double()

        gradient.handle = node.register_prehook(added)
        self._followed[id(leaf)] = gradient

    def after_backward(self) -> None:
        """It has ended: compares, now and then."""
        if self.position.backward_depth:
            return
        with self.position.mute(), torch.no_grad():
            for gradient in self._followed.values():
                if gradient.parameter.grad is not None:
                    gradient.now = _part(gradient.parameter.grad)
                gradient.added += 1
            if any(gradient.added.bit_count() == 1 for gradient in self._followed.values()):
                self._compare()

    def before_step(self, optimizer: "Optimizer") -> None:
        """The gradients are taken, and those that follow are others."""
        with self.position.mute(), torch.no_grad():
            self._compare()
        for gradient in self._followed.values():
            gradient.handle.remove()
        self._followed.clear()

    def _compare(self) -> None:
        """Tells of the gradient that is furthest off, where that is more than as many random roundings of a growing sum make of it."""
        off_by: list[tuple[float, _Gradient]] = []
        for gradient in self._followed.values():
            size, off = float(gradient.exact.norm()), float((gradient.now.double() - gradient.exact).norm())
            dtype = DTYPES[short_name(gradient.now.dtype)]
            random = DEVIATIONS * dtype.epsilon / 4 * math.sqrt(gradient.added / 3)
            if gradient.added >= FEWEST and max(digits_lost(dtype.name), random) * size < off < size:
                off_by.append((off / size, gradient))
        if not off_by:
            return
        gradient = max(off_by, key=lambda pair: pair[0])[1]
        if gradient.added <= self._told:
            return
        self._told = gradient.added
        errors = (gradient.now.double() - gradient.exact).abs()
        worst = int(errors.argmax())
        self.session.emit(
            RoundedSum(
                source="" if self._line is None else self._line.source,
                dtype=short_name(gradient.now.dtype),
                added=gradient.added,
                exact=float(gradient.exact[worst]),
                value=float(gradient.now[worst]),
                error=float(errors[worst]),
            )
        )


def _is_added_to(leaf: Tensor) -> bool:
    gradient = leaf.grad
    return gradient is not None and gradient.dtype in (torch.float16, torch.bfloat16) and measurable(gradient)


def _part(gradient: Tensor) -> Tensor:
    return gradient.detach().reshape(-1)[:: -(-gradient.numel() // ELEMENTS)].clone()
