"""All instruments of one watched process, wired together."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor.instrument.arrivals import Arrivals
from dtypedoctor.instrument.autocast import AutocastLog, RegionLog
from dtypedoctor.instrument.code_places import CodePlaces
from dtypedoctor.instrument.collectives import Collectives, Row
from dtypedoctor.instrument.facts import ModelFacts
from dtypedoctor.instrument.frames import raising_operator
from dtypedoctor.instrument.guard import Guard
from dtypedoctor.instrument.naming import Names
from dtypedoctor.instrument.op_windows import OpWindow, OpWindows
from dtypedoctor.instrument.optimizer_samples import OptimizerSamples
from dtypedoctor.instrument.optrace import OpTrace
from dtypedoctor.instrument.phases import Phases
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.scaling import ScalerLog, UnscaleLog
from dtypedoctor.instrument.sharding import ShardCalls
from dtypedoctor.instrument.silent.checks import SilentChecks
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.instrument.watch import ModuleWatch
from dtypedoctor.trace.events import Raised
from dtypedoctor.trace.writer import TraceWriter

MAX_FRAMES = 40


class Instruments:
    """Starts and stops everything that watches a process.

    Args:
        writer: where the records go.
        watch: False leaves the process untouched but for exceptions and what the workload itself reports.
        windows: where the op trace is on.
        every: everything is measured in each ``every``-th training step, the first one included; in the others (and always
            where this is 0) only the residual stream and the loss.
    """

    def __init__(
        self, writer: TraceWriter, *, watch: bool = True, windows: Sequence[OpWindow] = (), every: int = 1
    ) -> None:
        self.position = Position()
        self.writer = writer
        self._watch = watch
        self._autocast = AutocastLog()
        self.names = Names(writer)
        self.code_places = CodePlaces(self.names)
        self.guard = Guard(writer, self.position)
        self._phases = Phases(self.position, self.guard)
        self._modules = ModuleWatch(writer, self.position, self.names, self._autocast, self.guard)
        self._modules.every = every
        self._samples = OptimizerSamples(writer, self.position, self.names, self._modules.sample_now)
        self._ops = OpTrace(writer, self.position, self.names, self._autocast, self.guard)
        self.collectives = Collectives(writer, self.position, self.names, self.guard, self._sample_collective)
        self.sharding = ShardCalls(writer, self.position, self.guard)
        self._again = [window.call for window in windows if window.eager]
        self._windows = OpWindows(self._ops, self.position, windows)
        self.silent = SilentChecks(writer, self.position, self.names, self._autocast, self.guard)
        self._facts = ModelFacts(writer, self.position, self.names)
        self.arrivals = Arrivals()
        self._unscale = UnscaleLog(writer, self.position, self.names, self.arrivals)
        self._scaler = ScalerLog(writer, self.position, self.arrivals)
        self._regions = RegionLog(writer, self.position)
        self._listen()

    def _listen(self) -> None:
        self._phases.before_backward.append(self._before_backward)
        self._phases.after_backward.append(self._after_backward)
        self._phases.before_step.append(self._before_step)
        self._phases.after_step.append(self._after_step)
        self._phases.after_scaler.append(self._after_scaler)
        self._modules.before_root.append(self._before_call)
        self._modules.after_root.append(self._after_call)
        self._modules.on_error.append(self._ops.refused_by_module)
        if self._watch:
            self._phases.before_unscale.append(self._unscale.tell)
            self._modules.before_root += [self._facts.tell, self.code_places.learn]
            self._autocast.entered.append(self.guard.shield(self._regions.tell, "some autocast regions"))
            self.silent.listen(self._phases, self._modules)
            self._windows.scaled_backward.append(self.silent.scaled_backward)
            if self._again:
                self.silent.make_again(self._again, self._modules)

    def start(self) -> None:
        """Begins to watch."""
        self._autocast.start()
        self._phases.start()
        self._phases.follow_generate()
        if self._watch:
            self._modules.start()
            self.collectives.start()
            self.sharding.start()
            self.silent.start()
        self._windows.start()

    def stop(self) -> None:
        """Stops watching and puts back everything that was replaced."""
        if self._watch:
            self.silent.stop()
            self.collectives.stop()
            self.sharding.stop()
        self._ops.close()
        self._samples.look_closer()
        self._modules.stop()
        self._phases.stop()
        self._autocast.stop()
        self.arrivals.finish()

    @property
    def phases(self) -> Phases:
        """What tells of backward passes and optimizer steps."""
        return self._phases

    @property
    def modules(self) -> ModuleWatch:
        """What tells of outermost module calls."""
        return self._modules

    @property
    def watching(self) -> bool:
        """Whether more than exceptions and the workload's own numbers is recorded."""
        return self._watch

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Nothing inside is recorded but the module that is being entered."""
        with self.position.during("probe"), self.position.mute(), self._modules.only_marking():
            yield

    def begin_stage(self, step: int) -> None:
        """A step of the scenario begins: its first training step is number ``step`` of the process."""
        self._phases.restart(step)

    def attach(self, model: nn.Module) -> None:
        """Names ``model`` as an outermost module before it is first called."""
        if self._watch and self.names.find(model) is None:
            self.names.add_root(model)

    def name_as(self, wrapper: nn.Module, model: nn.Module) -> None:
        """Gives ``wrapper``, through which ``model`` is called, the same name."""
        self.names.add_alias(wrapper, model)

    def detach(self, model: nn.Module) -> None:
        """Forgets ``model``, so that its memory can be freed; its number is not given to another."""
        self.names.remove_root(model)

    def _sample_collective(self, rows: Sequence[Row], at_once: bool) -> None:
        if not self._modules.whole:
            return
        self._modules.sample_rows(rows)
        if at_once:  # in the order of the stream: what comes next overwrites them
            self._modules.flush()

    def _before_call(self, module: nn.Module) -> None:
        if self._watch:
            self.collectives.start()
            self.collectives.settle()
        self._phases.follow_generate()
        self._windows.before_call(module)

    def _after_call(self, module: nn.Module) -> None:
        self._windows.after_call()
        self._look_closer()

    def _before_backward(self, tensors: list[Tensor]) -> None:
        self._windows.before_backward(tensors)
        if self._watch:
            found = [(0, str(i), t) for i, t in enumerate(tensors) if measurable(t)]
            self._modules.sample_now("loss", found, "forward")
            self._look_closer()

    def _after_backward(self) -> None:
        self._windows.after_backward()
        if self._watch:
            self.collectives.settle(backward_is_over=True)
            self._modules.flush()
            self._look_closer()

    def _look_closer(self) -> None:
        """Looks at all parameters where something has just been found not to be finite."""
        if self._modules.suspicious():
            self._samples.look_closer()

    def _before_step(self, optimizer: Optimizer) -> None:
        self.collectives.settle()
        if self._watch and self._modules.whole:
            self._samples.before_step(optimizer)
            self._modules.flush()
        self._windows.before_step()

    def _after_step(self, optimizer: Optimizer) -> None:
        self._windows.after_step()
        if self._watch:
            self._samples.after_step(optimizer, sentinel=not self._modules.whole)
            self._modules.flush()
            self.names.glance_at_parameters()

    def _after_scaler(self, scaler: Any, optimizer: Optimizer, skipped: bool) -> None:
        if skipped:
            self._windows.after_step()
        if self._watch:
            self._scaler.tell(scaler, skipped)

    def _recomputed_for(self, error: BaseException) -> list[str]:
        """The module whose recomputation torch compares with its forward pass, after leaving it, and finds different."""
        recomputed = self._modules.recomputed
        return [recomputed] if recomputed is not None and type(error).__name__ == "CheckpointError" else []

    def note_exception(self, error: BaseException) -> None:
        """Records an exception that reached the top."""
        identity, modules = self._modules.raised_in
        if identity != id(error):
            modules = self._recomputed_for(error)
        frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
        position = self.position
        self.writer.write(
            Raised(
                n=self.writer.next_n(),
                step=position.step,
                call=position.call,
                phase=self._phase_of(error),
                type=type(error).__name__,
                message=str(error)[:2000],
                frames=[f"{f.filename}:{f.lineno} {f.name}" for f in frames],
                modules=modules,
                op=raising_operator(error),
            )
        )

    def _phase_of(self, error: BaseException) -> str:
        """The phase in which an exception was raised; what was being done has been left by now."""
        identity, phase = self._phases.failure
        return phase if identity == id(error) else self.position.phase
