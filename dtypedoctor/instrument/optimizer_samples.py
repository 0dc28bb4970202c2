"""Measures the gradients and parameters that an optimizer works on.

Gradients are measured before every step: a weight's gradient can overflow where no module's does. Parameters only change
by a step that gradients have gone into, so in ordinary steps only some are measured after it, in turn, few enough that a
model of any size costs the same; and all of them as soon as anything at all is found not to be finite.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from dtypedoctor.instrument.coverage import Coverage
from dtypedoctor.instrument.naming import Names
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.recorder import When
from dtypedoctor.instrument.statistics import Rooted, local_part, measurable
from dtypedoctor.trace.writer import TraceWriter

BYTES_A_STEP = 64 << 20
"""Parameters measured after an ordinary step; what a CPU reads in a few milliseconds and a GPU in 20 microseconds."""

Sample = Callable[[str, list[Rooted], str, When | None], None]


@dataclass(slots=True)
class _Kept:
    """What is kept of one optimizer."""

    shape: tuple[int, ...]
    version: int
    named: list[Rooted]
    turn: int = 0
    steps: int = 0
    backward: bool = False
    """Whether a backward pass has ended since the last step."""
    when: When | None = None
    """Coordinates of the parameters after the last step."""
    measured: set[int] = field(default_factory=set)


class OptimizerSamples:
    """Measures around optimizer steps.

    Args:
        writer: gives sequence numbers.
        position: shared coordinates.
        names: knows the parameters' names.
        sample: measures named tensors as a kind of site in a phase.
        coverage: counts the gradients, and those that were measured.
    """

    def __init__(
        self, writer: TraceWriter, position: Position, names: Names, sample: Sample, coverage: Coverage
    ) -> None:
        self._writer = writer
        self._position = position
        self._names = names
        self._sample = sample
        self._coverage = coverage
        self._kept: WeakKeyDictionary[Optimizer, _Kept] = WeakKeyDictionary()

    def before_step(self, optimizer: Optimizer) -> None:
        """Measures all gradients, and before the first step the parameters as they were before any training."""
        kept = self._of(optimizer)
        if kept.when is None and not kept.steps:
            self._sample("initial", [_held(one) for one in kept.named], "optimizer", None)
        held = [(r, name, local_part(p.grad)) for r, name, p in kept.named if p.grad is not None]
        found = [one for one in held if measurable(one[-1])]
        self._coverage.gradients += len(held)
        if found:
            self._sample("grad", found, "backward", None)
            self._coverage.gradients_measured += len(found)

    def gradients_left(self) -> list[Rooted]:
        """The gradients of all optimizers that no step has taken."""
        found: list[Rooted] = []
        for optimizer, kept in self._kept.items():
            if kept.backward:
                held = ((r, name, local_part(p.grad)) for r, name, p in self._of(optimizer).named if p.grad is not None)
                found += [one for one in held if measurable(one[-1])]
        return found

    def backward_is_over(self) -> None:
        """A backward pass has ended, and left gradients."""
        for kept in self._kept.values():
            kept.backward = True

    def skipped(self, optimizer: Optimizer) -> None:
        """A loss scaler has found the gradients unfit and does not let the optimizer take them."""
        if optimizer in self._kept:
            self._kept[optimizer].backward = False

    def after_step(self, optimizer: Optimizer, *, sentinel: bool = False) -> None:
        """Measures those parameters whose turn it is; after the first step all, with ``sentinel`` none."""
        kept = self._of(optimizer)
        position = self._position
        kept.when = When(self._writer.next_n(len(kept.named)), position.step, position.call)
        kept.measured.clear()
        kept.backward = False
        if sentinel:
            return
        kept.steps += 1
        budget = BYTES_A_STEP if kept.steps > 1 else sum(p.nbytes for *_, p in kept.named)
        places: list[int] = []
        while len(places) < len(kept.named) and budget > 0:
            places.append(kept.turn)
            budget -= kept.named[kept.turn][-1].nbytes
            kept.turn = (kept.turn + 1) % len(kept.named)
        self._measure(kept, sorted(places))

    def look_closer(self) -> None:
        """Something was not finite: measures all parameters that have not been measured since their optimizer's last step.

        They get the coordinates of that step, so that they stand before what they may have spoilt.
        """
        for kept in self._kept.values():
            self._measure(kept, [i for i in range(len(kept.named)) if i not in kept.measured])

    def _measure(self, kept: _Kept, places: list[int]) -> None:
        if kept.when is None:
            return
        kept.measured.update(places)
        n, step, call = kept.when
        run: list[int] = []
        for place in [*places, -1]:
            if run and place != run[-1] + 1:  # numbers in one call of sample() follow each other
                self._sample("param", [_held(kept.named[i]) for i in run], "optimizer", When(n + run[0], step, call))
                run = []
            run.append(place)

    def _of(self, optimizer: Optimizer) -> _Kept:
        shape = tuple(len(group["params"]) for group in optimizer.param_groups)
        kept = self._kept.get(optimizer)
        if kept is None or kept.shape != shape or kept.version != self._names.version:
            fresh = _Kept(shape, self._names.version, self._named(optimizer))
            if kept is not None:
                fresh.steps = kept.steps
            kept = self._kept[optimizer] = fresh
        return kept

    def _named(self, optimizer: Optimizer) -> list[Rooted]:
        known = {
            id(tensor): (root, name) for root, name, tensor, _, is_buffer in self._names.tensors() if not is_buffer
        }
        found: list[Rooted] = []
        for group_number, group in enumerate(optimizer.param_groups):
            for number, parameter in enumerate(group["params"]):
                if parameter.requires_grad and measurable(local_part(parameter)):
                    unknown = (0, f"param_groups.{group_number}.{number}")
                    found.append((*known.get(id(parameter), unknown), parameter))
        return found


def _held(named: Rooted) -> Rooted:
    """A parameter with what this process holds of it."""
    root, name, parameter = named
    return root, name, local_part(parameter)
