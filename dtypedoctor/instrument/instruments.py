"""All instruments of one watched process, wired together."""

import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isfinite
from operator import itemgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor._torch_private import LOST, NEWEST_TESTED, EntersCompiled, untested_release
from dtypedoctor.instrument.bad_values import OPERATOR_CAPSULES, BadValues, KeptOperators, ends_of
from dtypedoctor.instrument.budget import Budget
from dtypedoctor.instrument.collectives import Collectives, Row
from dtypedoctor.instrument.contents import tensors_given, tensors_in
from dtypedoctor.instrument.dtype_lines import DtypeLines, lines_of_notebook
from dtypedoctor.instrument.float32_program import Originals, Programs
from dtypedoctor.instrument.frames import line_of
from dtypedoctor.instrument.gradients import LeafGradients, OptimizerSamples, ScalerLog, UnscaleLog
from dtypedoctor.instrument.in_place import CAPSULE_LIMIT, InPlaceReplays
from dtypedoctor.instrument.module_tree import parameters_in
from dtypedoctor.instrument.naming import CodePlaces
from dtypedoctor.instrument.operators import Arguments
from dtypedoctor.instrument.phases import SHOWN, Exports, Phases, ScalerStep, Threads
from dtypedoctor.instrument.places import When
from dtypedoctor.instrument.readable import Arrivals, values_of
from dtypedoctor.instrument.sentinel import Sentinel
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.silent.checks import Checks
from dtypedoctor.instrument.silent.float32_shadows import OverflowsOutside
from dtypedoctor.instrument.silent.reruns import CompiledCalls
from dtypedoctor.instrument.silent.shadows import Shadows
from dtypedoctor.instrument.silent.state import StateCheck
from dtypedoctor.instrument.silent.underflow import GradientCheck
from dtypedoctor.instrument.statistics import HALF, Rooted
from dtypedoctor.instrument.watch import ModuleWatch
from dtypedoctor.instrument.whereabouts import CaughtLog, RegionLog, behind, call_arguments, raised_record
from dtypedoctor.trace.events import COMPILED_OUTSIDE, END_OF_PROGRAM, REPLAY_OF_FAILURES, WORKED_ELSEWHERE, NotWatched
from dtypedoctor.trace.records.execution import ReturnedSince
from dtypedoctor.trace.writer import TraceWriter

CAUGHT = "exceptions that the program may have caught"
FOLLOWED = 1 << 18
"""Elements of the operands and results of an operator outside of modules up to which it is remembered how a value came about."""
MAX_ACCUMULATED = 100
"""Backward passes whose gradients are recorded although they are finite and no optimizer takes them."""

HOW_TO_REPLAY = "DTYPEDOCTOR_REPLAY_IN_PLACE"
"""Environment variable for tests: ``late`` for what is known late only, as on a device, or a number for each so-manieth call although nothing fails."""
WHY_COMPILED_OUTSIDE = "compiled code runs no module hooks; compile the module itself to have its inputs and outputs measured, or run with --ablate compile"


class Instruments:
    """Starts and stops everything that watches a process.

    Args:
        writer: where the records go.
        watch: False leaves the process untouched but for exceptions and what the workload itself reports.
        budget: says which steps are looked at, between which the loss and gradients are measured; None for all.
        look_steps: up to which training step the operators of some calls are looked at for failures that leave finite values; None: in all.

    Attributes:
        session: what all instruments share; ``writer``, ``position``, ``names``, ``guard`` and ``coverage`` are its own.
        watching: whether more than exceptions and the workload's own numbers is recorded.
        phases: says when backward passes and optimizer steps begin and end.
        modules: says when outermost modules are called.
    """

    def __init__(
        self,
        writer: TraceWriter,
        *,
        watch: bool = True,
        budget: Budget | None = None,
        look_steps: int | None = None,
    ) -> None:
        self._budget = budget if watch else None
        self.session = session = Session(writer)
        if self._budget is not None:
            self._budget.is_in_half = lambda: session.is_in_half
        self.writer = writer
        self.position, self.names, self.guard = session.position, session.names, session.guard
        self.coverage = session.coverage
        self.watching = watch
        self._counted = self._stopped = False
        self.phases = Phases(session)
        self._of_thread = self.phases.of_thread
        self.modules = ModuleWatch(session, self._budget)
        self.code_places = CodePlaces(session.names)
        self._regions = RegionLog(session)
        self._caught = CaughtLog(session)
        self.arrivals = Arrivals()
        self._unscale = UnscaleLog(session, self.arrivals)
        self._scaler = ScalerLog(session, self.arrivals, self._fused_step_skipped)
        self._samples = OptimizerSamples(session, self._sample_of_step, self.arrivals, self._gradient_known)
        self._leaves = LeafGradients(session)
        self._gradients = 0
        self.collectives = Collectives(session, self._sample_collective)
        self._dtype_lines = DtypeLines(session.guard.shield, lines_of_notebook())
        session.names.set_by = self._dtype_lines.set_by
        originals = Originals()
        originals.outside = self._programs = Programs(session, FOLLOWED)
        self._computes_in_half: dict[int, bool] = {}
        self.checks = Checks(session, originals, look_steps=look_steps)
        self.in_place = InPlaceReplays(
            session, self.modules, self.phases, originals, lambda: self._of_thread, self._samples.look_closer,
            self.checks.look.at_call_made_again,
        )  # fmt: skip
        """Replays calls that fail; begins only where it is asked to."""
        self.hears_loss: Callable[[Tensor], Callable[[float], None]] = lambda loss: _unheard
        """Says what is to be told the number of a loss that a backward pass begins from, where it is asked for anyway."""
        self._bad = BadValues(session)
        self._operators_kept: KeptOperators | None = None
        self._exports = Exports(session.guard, self._values_leave)
        self._bad.noticed = self.checks[Shadows].noticed = self._exports.start
        self.sentinel = self._new_sentinel()
        self._threads = Threads(session.guard, self._thread_begins, self._thread_ends)
        self._children = mmap.mmap(-1, 1)  # shared with processes that the program forks
        self.position.silent_work = self._note_child
        if watch:
            self._listen()
        else:
            self._listen_to_steps()

    def _listen_to_steps(self) -> None:
        """Who hears of each moment where nothing is watched: what counts steps and calls."""
        phases, modules = self.phases, self.modules
        modules.before_root = [self._before_call]
        modules.after_root = [self._after_call]
        phases.before_backward = [self._before_backward]
        phases.after_backward = [self._after_backward]
        phases.before_step = [self._before_step]
        phases.after_step = [self._after_step]
        phases.after_scaler = [self._after_scaler]

    def _listen(self) -> None:
        """Who hears of each moment, in the order in which they do."""
        phases, modules, checks = self.phases, self.modules, self.checks
        hearing, look = self._hearing, checks.look
        look.moves = checks[StateCheck]
        modules.before_any = [self._enters_modules]
        learn = self.code_places.learn
        modules.before_root = [self._before_call]
        modules.before_first = [learn, *hearing("before_call", look.before_call)]
        modules.on_error = [self._note_left]
        modules.on_return = hearing("returned", self._note_returned)
        modules.after_root = [look.after_call, *hearing("after_call"), self._after_call]
        modules.after_any = [self._leaves_modules]
        modules.returned.hear_gradients(self._note_gradient, self._bad.known, checks[Shadows].gradients)
        phases.before_generate = checks.hearing("before_generate")
        # a backward pass inside of a call would leave the look's mode in another order
        phases.before_backward = [look.after_call, *hearing("before_backward"), self._before_backward]
        phases.inside_backward = [self._inside_backward]
        phases.on_gradients = [self._measure_returned]
        phases.after_backward = [self._after_backward, *hearing("after_backward")]
        phases.on_scaled = hearing("scaled")
        checks.in_scaler = lambda: phases.in_scaler
        phases.before_unscale = [self._unscale.tell, *hearing("before_unscale")]
        phases.before_step = [self._before_step, *hearing("before_step")]
        phases.after_step = [self._after_step, *hearing("after_step")]
        phases.after_scaler = [self._after_scaler]
        phases.on_failure = [self.note_caught]
        phases.compiled_begins = self._compiled_begins
        phases.compiled_called = self.guard.shield(self._compiled_called, COMPILED_OUTSIDE)
        entered = (*checks.hearing("entered"), self._regions.tell)
        self.session.autocast.entered = [self.guard.shield(listener, "some autocast regions") for listener in entered]
        phases.step_begins, phases.without_gradients = modules.plan_step, modules.begins_anew
        checks[GradientCheck].on_zeros.append(self.in_place.zeros_seen)

    def _hearing(self, moment: str, *more: Callable[..., None]) -> list[Callable[..., None]]:
        """What tells the checks of a moment, and others than them; between looks few of them hear of it."""
        all_of_them, few = [*self.checks.hearing(moment), *more], self.checks.hearing(moment, between_looks=True)

        def tell(*facts: Any) -> None:
            for listener in all_of_them if self.position.looks else few:
                listener(*facts)

        return [tell]

    def start(self) -> None:
        """Begins to watch."""
        self.session.autocast.start()
        self.phases.start()
        self.phases.follow_generate()
        if self.watching:
            if release := untested_release():
                newest = ".".join(map(str, NEWEST_TESTED))
                self.guard.tell(f"torch {release}", f"newer than {newest}, the newest that dtypedoctor was tested with")
            for what, name in LOST.items():
                self.guard.tell(what, f"this torch has no {name}")
            self.modules.start()
            self.collectives.start()
            self._dtype_lines.start()
            self.checks.start()
        if self.watching:
            self._thread_begins(self.sentinel)
            self._threads.start()

    def stop(self) -> None:
        """Stops watching and puts back everything that was replaced."""
        if self.watching:
            self._threads.stop()
            self._exports.stop()
            if self._children[0]:
                self.guard.tell("computation in forked processes", WORKED_ELSEWHERE)
            self._stopped = True
            self.sentinel.stop()
            self._measure_gradients(self._samples.gradients_left() if self.position.looks else [])
            self.checks.stop()
            self._dtype_lines.stop()
            self.collectives.stop()
            if self.modules.recorders.news.suspicious:
                self._samples.describe_optimizers()
        self._samples.look_closer()
        self.in_place.finish()
        self.modules.stop()
        self.phases.stop()
        self.session.autocast.stop()
        if (silent := self.arrivals.finish()) is not None:
            self.guard.failed(END_OF_PROGRAM, silent)
        if self.watching and not self._counted:
            self._counted = True
            for note in self._left_out():
                self.writer.write(note)
            self.writer.write(self.coverage)

    def _left_out(self) -> Iterator[NotWatched]:
        """What was not measured because it was not its turn, in words."""
        if self._budget is not None:
            yield from self._budget.left_out(self.modules.passed_by)

    def _values_leave(self, way: str, tensor: Tensor) -> None:
        if way != SHOWN:  # infinities are shown as what they are: a mask, a bound
            self._bad.left(way, tensor)
        self.checks[Shadows].left(tensor)

    def begin_stage(self, step: int) -> None:
        """A step of the scenario begins: its first training step is number ``step`` of the process."""
        self.phases.restart(step)

    def attach(self, model: nn.Module) -> None:
        """Names ``model`` as an outermost module before it is first called."""
        if self.watching and self.names.find(model) is None:
            self.names.add_root(model)

    def name_as(self, wrapper: nn.Module, model: nn.Module) -> None:
        """Gives ``wrapper``, through which ``model`` is called, the same name."""
        self.names.add_alias(wrapper, model)

    def detach(self, model: nn.Module) -> None:
        """Forgets ``model``, so that its memory can be freed; its number is not given to another."""
        self.names.remove_root(model)

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Nothing inside is recorded but the module that is being entered."""
        with self.position.during("probe"), self.position.mute(), self.modules.only_marking():
            yield

    def _before_call(self, module: nn.Module) -> None:
        if self.position.overrides:
            self.phases.forget_ended_steps()
        if self.watching:
            self.collectives.start()
            self.collectives.settle()
        self.phases.follow_generate()

    def _after_call(self, module: nn.Module) -> None:
        self._look_closer()

    def _before_backward(self, tensors: list[Tensor]) -> None:
        if self.watching:
            self.modules.plan_step()
            if (sentinel := self._of_thread.sentinel) is not None:
                sentinel.backward_begins(tensors)
            if self.position.looks:
                self._leaves.before(tensors)
            found = [(0, str(i), t) for i, t in enumerate(map(values_of, tensors)) if t is not None]
            self.coverage.losses += len(tensors)
            self.coverage.losses_measured += len(found)
            if len(found) == 1 and found[0][2].numel() == 1 and not (self.position.looks or self._bad.known):
                self._glance_at_loss(found[0], tensors[0])
            else:
                self._measure_outside("loss", found, "forward")
            self._look_closer()

    def _glance_at_loss(self, named: Rooted, loss: Tensor) -> None:
        """Asks for the number of a loss alone, which is as good as measuring it: between looks this is all that is done."""
        site, heard = self.modules.site_of("loss", named, "forward"), self.hears_loss(loss)
        when = When(self.writer.next_n(), self.position.step, self.position.call)

        def tell(number: float) -> None:
            if isfinite(number):
                self.writer.write_finite(*when, site, abs(number))
            else:
                self.modules.recorders.note_known(site, number, when)
            heard(number)

        self.arrivals.ask(named[2], tell)

    def _inside_backward(self, tensors: list[Tensor]) -> None:
        if self.position.looks:
            self._leaves.inside(tensors)

    def _after_backward(self) -> None:
        if self.watching:
            self.collectives.settle(backward_is_over=True)
            self._measure_gradients(self._leaves.after())
            self._samples.backward_is_over()
            if self.position.looks or not self._leaves.claimed:  # else before the optimizer's step
                self.modules.recorders.flush()
            self._look_closer()

    def _before_step(self, optimizer: Optimizer) -> None:
        self.collectives.settle()
        self._leaves.claim()
        if self.watching:
            self.modules.optimizer_steps()
            if self.position.looks:
                self._samples.before_step(optimizer)
            else:
                self._samples.glance(optimizer)
                self._look_closer()
            self.modules.recorders.flush()

    def _after_step(self, optimizer: Optimizer) -> None:
        if self.watching:
            looks = self.position.looks
            self._samples.after_step(optimizer, looks=looks)
            if looks:
                self.modules.recorders.flush()
                self.names.glance_at_parameters()

    def _after_scaler(self, ended: ScalerStep) -> None:
        if not ended.called:
            self._samples.skipped(ended.optimizer)
            self._sign_of_skipped_step()
        if self.watching:
            self._scaler.tell(ended)

    def _fused_step_skipped(self) -> None:
        self.phases.uncount()
        self._sign_of_skipped_step()

    def _sign_of_skipped_step(self) -> None:
        if self._budget is not None:
            self._budget.sign(self.position.step, "the gradient scaler skipped a step")

    def _sample_of_step(self, kind: str, found: list[Rooted], phase: str, when: When | None) -> None:
        if kind == "grad":
            self._measure_outside(kind, found, phase)
        else:
            self.modules.sample_now(kind, found, phase, when)

    def _gradient_known(self, named: Rooted, magnitude: float, when: When) -> None:
        self.modules.recorders.note_known(self.modules.site_of("grad", named, "backward"), magnitude, when)

    def _sample_operator(self, name: str, tensor: Tensor) -> None:
        self.modules.sample_now("operator", [(0, name, tensor)], self.position.phase)

    def _sample_collective(self, rows: Sequence[Row], at_once: bool) -> None:
        if not self.position.looks:  # issued in a step that was looked at, and over in one that is not
            return
        self.modules.sample_rows(rows)
        if at_once:  # in the order of the stream: what comes next overwrites them
            self.modules.recorders.flush()

    def _measure_returned(self, gradients: object) -> None:
        self._measure_gradients(self._leaves.returned(gradients))

    def _measure_gradients(self, found: list[Rooted]) -> None:
        """Of gradients that no optimizer takes, all are measured; beyond the first few only those that are not finite are recorded."""
        self._gradients += 1
        if found and self._gradients > MAX_ACCUMULATED:
            found = [one for one in found if one[-1].device.type != "cpu" or not ends_of(one[-1]).finite]
        if found:
            self._measure_outside("accumulated", found, "backward")

    def _measure_outside(self, kind: str, found: list[Rooted], phase: str) -> None:
        """Measures what no module returned, and says where in the ops the sentinel has seen it, if it is not finite."""
        position = self.position
        first = self.writer.next_n(len(found))
        self.modules.sample_now(kind, found, phase, When(first, position.step, position.call))
        if not self._bad.known:
            return
        for number, (_, _, tensor) in enumerate(found, first):
            self._bad.sampled("loss" if kind == "loss" else "gradient", tensor, number)

    def _note_gradient(self, gradient: Tensor, number: int) -> None:
        """The gradient of what a module returned is sample ``number``: says where the sentinel has seen it, if it is not finite."""
        if self._bad.known:
            self._bad.sampled("gradient", gradient, number)
        self.checks[Shadows].take([gradient], "gradient")

    def _look_closer(self) -> None:
        """Looks at all parameters where something has just been found not to be finite."""
        news = self.modules.recorders.news
        if news.suspicious:
            news.suspicious = False
            self._samples.look_closer()
            self._samples.describe_optimizers()
            if self._budget is not None:
                self._budget.sign(self.position.step, "a value was not finite")
            self.checks.look.look_again()

    def _enters_modules(self, module: nn.Module) -> None:
        """An outermost call begins: hooks see what happens from here on; what goes in has been seen by the sentinel."""

        def given() -> list[Tensor]:
            args, kwargs = call_arguments(module)
            return [tensor for _, tensor in tensors_given(args, kwargs)]

        if (sentinel := self._of_thread.sentinel) is not None:
            sentinel.modules_begin(given)
        if self._bad.known:
            self._bad.enters(given(), module)

    def _note_returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Outside of modules the float32 program begins with what a module returns, where half precision is at work in it."""
        results = list(map(itemgetter(1), tensors_in(output)))
        if self.position.looks:
            line = line_of(sys._getframe())
            self._programs.made(results, [], type(module).__name__, line.source if line is not None else None)
        if self._regions.any or any(t.dtype in HALF for t in results) or self._is_in_half(module):
            self.session.is_in_half = True
            self._programs.in_float32.begins_with(results)
        if self.modules.recorders.news.suspicious and self._of_thread.sentinel is not None:
            for tensor in results:
                self._bad.returned(tensor)

    def _is_in_half(self, module: nn.Module) -> bool:
        """Whether a parameter of an outermost module was half precision when it was first called."""
        if id(module) not in self._computes_in_half:
            self._computes_in_half[id(module)] = any(parameter.dtype in HALF for parameter in parameters_in(module))
        return self._computes_in_half[id(module)]

    def _leaves_modules(self) -> None:
        if (sentinel := self._of_thread.sentinel) is not None:
            sentinel.modules_end()

    def _new_sentinel(self) -> Sentinel:
        sentinel = Sentinel(self.session, self._bad, self._sample_operator)
        sentinel.quiet = lambda: self._stopped
        sentinel.raised = self.guard.shield(partial(self._note_outside, sentinel), CAUGHT)
        sentinel.computed = self._note_child
        sentinel.writing = self.checks.hearing("writing")
        sentinel.state, sentinel.in_scaler = self.checks[StateCheck], lambda: self.phases.in_scaler
        sentinel.following = self.checks.following
        sentinel.programs = self._programs
        shadows = self.checks[Shadows]
        sentinel.shadowed, sentinel.readout = shadows.ran_outside, shadows.read
        sentinel.lifted = self.checks.hearing("lifted")
        overflows = self.checks[OverflowsOutside]
        overflows.whereabouts.is_inside = sentinel.is_of_a_module
        sentinel.rounded, sentinel.overflowed = overflows.wants, overflows.ran_outside
        sentinel.rejected = self.guard.shield(self._keep_rejected, OPERATOR_CAPSULES)
        return sentinel

    def replay_failures(self, limit: int | None = CAPSULE_LIMIT) -> None:
        """From now on, makes calls that fail again, and leaves capsules of them, and of operators outside of modules, of at most ``limit`` bytes each, beside the trace; None leaves none."""
        how = os.environ.get(HOW_TO_REPLAY, "")
        self.in_place.begin(force=int(how) if how.isdecimal() else 0, late=how == "late", capsule_limit=limit)
        if limit is None:
            return
        self._operators_kept = KeptOperators(self.session, limit)
        self._bad.kept = self.guard.shield(self._operators_kept.made_bad, OPERATOR_CAPSULES)

    def _keep_rejected(self, func: Any, arguments: Arguments, error: BaseException) -> None:
        if self._operators_kept is not None:
            self._operators_kept.rejected(func, arguments, error)

    def _thread_begins(self, sentinel: Sentinel | None = None) -> None:
        self._of_thread.sentinel = sentinel or self._new_sentinel()
        self._of_thread.sentinel.start()

    def _thread_ends(self) -> None:
        if (sentinel := self._of_thread.sentinel) is not None:
            sentinel.leave()

    def _compiled_begins(self) -> None:
        if (sentinel := self._of_thread.sentinel) is not None:
            sentinel.compiled_begins()

    def _compiled_called(self, entered: EntersCompiled) -> None:
        here = self.position.here
        self.modules.compiled_called()
        if self.watching and self.position.looks:
            with self.phases.forward_only():
                self.checks[CompiledCalls].before_compiled(entered)
        if self.watching and not (here.stack or here.backward_depth):
            self.coverage.compiled_outside += 1
            self.guard.tell(COMPILED_OUTSIDE, WHY_COMPILED_OUTSIDE)

    def _note_child(self) -> None:
        """A module, a backward pass or an operator in half precision runs in a forked process, which leaves no trace. What a data loader's worker makes comes back."""
        loader = sys.modules.get("torch.utils.data")
        if loader is None or loader.get_worker_info() is None:
            self._children[0] = 1

    def note_exception(self, error: BaseException) -> None:
        """Records an exception that reached the top, and those that it was raised from."""
        modules, phase = self._raised_in(error)
        with self.guard.keeping(REPLAY_OF_FAILURES):
            self.in_place.ends(error, outside=not modules and phase != "backward")
        record = raised_record(error, self.session, modules, phase)
        identity, operator = self._caught.operator
        if identity == id(error):  # its traceback has been cleaned of the operator's frame since
            record = replace(record, op=operator)
        self.writer.write(record)
        self.note_behind(error)

    def note_thread_ends(self, error: BaseException) -> None:
        """Records an exception that ends this thread of the program, and those that it was raised from."""
        for one in (error, *behind(error)):
            self.note_caught(one, ending=True, thread=True)

    def note_behind(self, error: BaseException) -> None:
        """Records the exceptions that ``error``, which ends the program, was raised from."""
        for cause in behind(error):
            self.note_caught(cause, ending=True)

    def note_caught(self, error: BaseException, *, root: int = -1, ending: bool = False, thread: bool = False) -> None:
        """Records an exception where it is raised: the program may catch it.

        Args:
            error: was raised.
            root: number of the outermost module whose call it has left; -1 outside of all.
            ending: whether the program, or with ``thread`` this thread of it, ends because of it.
            thread: see ``ending``.
        """
        modules, phase = self._raised_in(error)
        self._caught.note(error, modules, phase, root=root, ending=ending, thread=thread)

    def _note_left(self, module: nn.Module, args: Any, error: BaseException) -> None:
        found = self.names.find(module)
        self.note_caught(error, root=found[0] if found is not None else -1)

    def _note_outside(self, sentinel: Sentinel, func: Any, arguments: Arguments, error: BaseException) -> None:
        """An operator outside of modules has just raised; where it returns later, as in a fallback, that is recorded, too."""
        self.modules.raised_in = (id(error), [])
        number = self._caught.note(error, [], self._phase_of(error), fresh=True)
        if number is not None:
            returned = self.guard.shield(partial(self.session.emit, ReturnedSince(caught=number)), CAUGHT)
            sentinel.follow_until_it_returns(func, arguments, returned)

    def _raised_in(self, error: BaseException) -> tuple[list[str], str]:
        """The module calls that were open where an exception was raised, outermost first, and the phase."""
        identity, modules = self.modules.raised_in
        return modules if identity == id(error) else self._recomputed_for(error), self._phase_of(error)

    def _recomputed_for(self, error: BaseException) -> list[str]:
        """The module whose recomputation torch compares with its forward pass, after leaving it, and finds different."""
        recomputed = self.modules.recomputed
        return [recomputed] if recomputed is not None and type(error).__name__ == "CheckpointError" else []

    def _phase_of(self, error: BaseException) -> str:
        """The phase in which an exception was raised; what was being done has been left by now."""
        identity, phase = self.phases.failure
        return phase if identity == id(error) else self.position.phase


def _unheard(number: float) -> None:
    """Stands for a listener that nobody has named."""
