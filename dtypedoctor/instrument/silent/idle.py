"""Optimizer steps that change nothing: no gradient reaches the optimizer's parameters, or its learning rate is 0. Both may be meant, as in a warm-up's first step."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from dtypedoctor.instrument.silent.observer import Observer, parameters_of
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.records.silent import IdleSteps

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

__all__ = ["IdleCheck"]

_COMPARED = 16
"""Parameters of which some elements are compared, and how many elements."""
_TOLD = 50
"""How often one optimizer may begin and end to be idle before no more of it is written."""


@dataclass(slots=True)
class _Standing:
    number: int
    reason: str = ""
    before: Sequence[Tensor] = ()
    told: int = 0
    is_idle: bool = False


class IdleCheck(Observer):
    """Writes an :class:`IdleSteps` where an optimizer begins and ends to step without a change.

    In steps that are looked at. Values are compared only where the step has no reason to change any: an optimizer may move parameters by other means than ``grad`` and ``lr``.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._numbers = count()
        self._standings: WeakKeyDictionary[Optimizer, _Standing] = WeakKeyDictionary()

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        standing = self._standings.get(optimizer)
        if standing is None:
            standing = self._standings[optimizer] = _Standing(number=next(self._numbers))
        # As far as can be told without waiting for a device.
        rates = [group.get("lr") for group in optimizer.param_groups]
        if all(isinstance(rate, (int, float)) and rate == 0 for rate in rates):
            standing.reason = "its learning rate is 0"
        elif all(parameter.grad is None for parameter in parameters_of(optimizer)):
            standing.reason = "none of its parameters has a gradient"
        else:
            standing.reason = ""
        with self.position.aside():
            standing.before = _some(optimizer) if standing.reason and standing.told < _TOLD else ()

    def after_step(self, optimizer: Optimizer) -> None:
        """It has stepped."""
        standing = self._standings.get(optimizer)
        if standing is None or not (standing.before or standing.is_idle):
            return
        with self.position.aside():
            pairs = zip(standing.before, _some(optimizer), strict=False)
            is_idle = bool(standing.before) and all(torch.equal(old, new) for old, new in pairs)
        standing.before = ()
        if is_idle != standing.is_idle:
            standing.is_idle, standing.told = is_idle, standing.told + 1
            name, number = type(optimizer).__name__, standing.number
            self.session.emit(IdleSteps(optimizer=name, number=number, is_idle=is_idle, reason=standing.reason))


def _some(optimizer: Optimizer) -> list[Tensor]:
    parameters = [parameter for parameter in parameters_of(optimizer) if measurable(parameter)][:_COMPARED]
    return [parameter.detach().reshape(-1)[:_COMPARED].clone() for parameter in parameters]
