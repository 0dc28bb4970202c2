"""Where training takes the parameters: how far each has moved from its start, so that two runs can be compared by what they have trained."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.operators import uncollected
from dtypedoctor.instrument.readable import held_values
from dtypedoctor.instrument.silent.observer import Observer, named_parameters_of
from dtypedoctor.instrument.statistics import measurable, out_of_their_sight
from dtypedoctor.trace.records.execution import ParameterEnds

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

SAMPLED = 64
"""Elements of a parameter that are followed."""
MOST_PARAMETERS = 512
"""Parameters of an optimizer that are followed, spread over all that it has."""
MOST_OPTIMIZERS = 16


@dataclass(slots=True)
class _Journey:
    """The followed elements of an optimizer's parameters before its first step and after its last, or the last that was a power of two."""

    names: list[str]
    dtypes: list[str]
    starts: list[Tensor]
    ends: list[Tensor]
    steps: int = 0
    """Steps taken; ``ended`` of them when ``ends`` were copied."""
    ended: int = 0


class ParameterJourneys(Observer):
    """Copies a few elements of each trained parameter before the first step, and writes a :class:`ParameterEnds` of how far they have moved at the end.

    They are copied after steps 1, 2, 4, 8 … as well, since an optimizer may be gone when the program ends. Nothing is read from a device before the end.
    """

    between_looks: ClassVar[bool] = True

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._journeys: list[_Journey] = []
        self._alive: WeakKeyDictionary[Optimizer, tuple[_Journey, Sequence[Tensor]]] = WeakKeyDictionary()

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to take a step."""
        if optimizer in self._alive or len(self._journeys) == MOST_OPTIMIZERS:
            return
        named = [pair for pair in named_parameters_of(optimizer, self.names) if _is_trained(pair[1])]
        named = named[:: -(-len(named) // MOST_PARAMETERS) or 1]
        parameters = [parameter for _, parameter in named]
        journey = _Journey([name for name, _ in named], list(map(dtype_name, parameters)), _copies(parameters), [])
        self._journeys.append(journey)
        self._alive[optimizer] = journey, parameters

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has taken a step."""
        if optimizer not in self._alive:
            return
        journey, parameters = self._alive[optimizer]
        journey.steps += 1
        if journey.steps & (journey.steps - 1) == 0:
            journey.ends, journey.ended = _copies(parameters), journey.steps

    def stop(self) -> None:
        """The program is over: tells of each optimizer that has taken a step."""
        for journey, parameters in self._alive.values():
            if journey.steps:
                journey.ends, journey.ended = _copies(parameters), journey.steps
        for journey in self._journeys:
            if journey.ended:
                self.session.emit(_ends_of(journey), phase="optimizer")
        self._journeys.clear()


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.is_floating_point() and held_values(parameter) is not None


def _copies(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Some elements of each parameter as float32; none of one that cannot be read now."""
    copies: list[Tensor] = []
    with out_of_their_sight():
        for parameter in parameters:
            values = parameter if measurable(parameter) else held_values(parameter)
            # FSDP2 frees the storage of a unit's parameters between calls and leaves their sizes as they were
            freed = values is None or not measurable(values) or not values.untyped_storage().nbytes()
            if values is None or freed or not values.is_contiguous():
                copies.append(torch.empty(0))
                continue
            flat = values.detach().view(-1)
            copies.append(flat[:: -(-flat.numel() // SAMPLED) or 1].to(torch.float32, copy=True))
    uncollected(copies)
    return copies


def _ends_of(journey: _Journey) -> ParameterEnds:
    """The record of a journey, without parameters that could not be read or are not finite."""
    record = ParameterEnds(steps=journey.ended, names=[], dtypes=[], sampled=[], moved=[], distance=[], norm=[])
    for name, dtype, start, end in zip(journey.names, journey.dtypes, journey.starts, journey.ends, strict=True):
        if not start.numel() or start.shape != end.shape:
            continue
        before, now = start.double().cpu(), end.double().cpu()
        distance, norm = float((now - before).norm()), float(now.norm())
        if math.isfinite(distance) and math.isfinite(norm):
            record.names.append(name)
            record.dtypes.append(dtype)
            record.sampled.append(now.numel())
            record.moved.append(int((now != before).sum()))
            record.distance.append(float(f"{distance:.4g}"))
            record.norm.append(float(f"{norm:.4g}"))
    return record
