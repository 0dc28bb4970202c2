"""All silent checks of one process, wired to the moments at which they look."""

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor.instrument.autocast import AutocastLog
from dtypedoctor.instrument.float32_program import Originals
from dtypedoctor.instrument.guard import Guard
from dtypedoctor.instrument.naming import Names
from dtypedoctor.instrument.phases import Phases
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.silent.float32_shadows import AbsorbedOverflows, RouterFlips
from dtypedoctor.instrument.silent.loading import LoadingCheck, PatchCheck
from dtypedoctor.instrument.silent.look import RoutineLook
from dtypedoctor.instrument.silent.notes import Notes
from dtypedoctor.instrument.silent.policies import RatioCheck, TwinCheck
from dtypedoctor.instrument.silent.reruns import CacheCheck, EagerReplay
from dtypedoctor.instrument.silent.rounding import IntegerCasts, PositionCheck, RotaryTables
from dtypedoctor.instrument.silent.updates import GradientCheck, UpdateCheck
from dtypedoctor.instrument.watch import ModuleWatch
from dtypedoctor.instrument.whereabouts import Whereabouts
from dtypedoctor.trace.writer import TraceWriter


class SilentChecks:
    """Looks for failures that raise nothing and leave finite values behind.

    Args:
        writer: where the observations go.
        position, names, autocast, guard, originals: shared with the other instruments.
    """

    def __init__(
        self, writer: TraceWriter, position: Position, names: Names, autocast: AutocastLog, guard: Guard,
        originals: Originals,
    ) -> None:  # fmt: skip
        self._notes = notes = Notes(writer, position)
        self._position = position
        whereabouts = Whereabouts(writer, position, names, autocast)
        self._rotary = RotaryTables(notes, names, position)
        seeing = (
            AbsorbedOverflows(notes, whereabouts),
            IntegerCasts(notes, whereabouts),
            RouterFlips(notes, whereabouts),
            PositionCheck(notes, whereabouts),
            self._rotary,
        )
        self._look = RoutineLook(seeing, position, guard)
        self._cache = CacheCheck(notes, names, position, autocast, guard)
        self._updates = UpdateCheck(notes, names, position)
        self._gradients = GradientCheck(notes, names, position, autocast)
        self._twins = TwinCheck(notes, names, position)
        self._ratios = RatioCheck(notes, names, position)
        self._loading = LoadingCheck(notes, position, guard, originals)
        self._patches = PatchCheck(notes, names)

    def listen(self, phases: Phases, modules: ModuleWatch) -> None:
        """Asks to be told of calls and optimizer steps.

        The look's mode has to be put on last and taken off first where an op trace is on as well.
        """
        modules.before_root.append(self._before_call)
        modules.on_return.append(self._twins.returned)
        modules.after_root.insert(0, self._after_call)
        phases.before_backward.insert(0, self._before_backward)
        phases.before_step.append(self._before_step)
        phases.after_step.append(self._after_step)

    def start(self) -> None:
        """Begins to look."""
        self._loading.start()

    def stop(self) -> None:
        """Stops looking."""
        self._look.after_call()
        self._cache.after_call()
        self._loading.stop()

    def make_again(self, calls: Collection[int], modules: ModuleWatch) -> None:
        """The outermost calls with these numbers are made once more in eager mode; for the second pass."""
        modules.on_return.append(EagerReplay(self._notes, self._position, calls).returned)

    def scaled_backward(self, tensors: list[Tensor]) -> None:
        """The experiment of :class:`GradientCheck`, for the second pass."""
        self._gradients.scaled_backward(tensors)

    def follow_pretrained(self) -> None:
        """transformers has been imported."""
        self._loading.follow_pretrained()

    def _before_call(self, module: nn.Module) -> None:
        self._patches.before_call(module)
        self._rotary.before_call(module)
        self._cache.before_call(module)
        self._look.before_call(module)

    def _after_call(self, module: nn.Module) -> None:
        self._look.after_call()
        self._cache.after_call()
        self._rotary.after_call()

    def _before_backward(self, tensors: list[Tensor]) -> None:
        self._look.after_call()  # a backward pass inside of a call would leave its mode in another order
        self._ratios.before_backward(tensors)

    def _before_step(self, optimizer: Optimizer) -> None:
        self._ratios.before_step()
        self._loading.before_step(optimizer)
        self._gradients.before_step(optimizer)
        self._updates.before_step(optimizer)

    def _after_step(self, optimizer: Any) -> None:
        self._updates.after_step(optimizer)
        self._cache.after_step(optimizer)
