"""The instruments around a process that is not the doctor's: a user's script, or a program that has asked to be watched."""

import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial, wraps
from math import isfinite
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor._torch_private import COMPILER, FRAME_COMPILER, MemoryRef
from dtypedoctor.instrument.budget import Budget
from dtypedoctor.instrument.compile_events import CompileWatch
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.instrument.operators import keep_compiler_out
from dtypedoctor.instrument.phases import ScalerStep
from dtypedoctor.instrument.readable import values_of
from dtypedoctor.instrument.session import FOR_GOOD
from dtypedoctor.trace.events import END_OF_PROGRAM, Environment, Metric, NotWatched
from dtypedoctor.trace.records.execution import LogFilter, OptimizerSteps, TestPassed
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.unpatched import at_fork, getpid, perf_counter
from dtypedoctor.worker.environment import StepDigest, describe_environment, peak_resident, resident
from dtypedoctor.worker.on_import import after_import
from dtypedoctor.worker.recording import Totals, hide_own_frames, own_kernels

if TYPE_CHECKING:
    from doctest import DocTestRunner, Example


GENERATION = "transformers.generation.utils"
"""Holds ``generate``, which calls the first module from inside."""


class Changes(Protocol):
    """What else than measuring a further run does to the program."""

    def begin(self) -> None:
        """Puts it in place."""

    def offer(self, module: nn.Module) -> None:
        """An outermost module is about to be called."""

    def end(self) -> None:
        """Records what it has done, and puts everything back."""


class ProcessWatch:
    """Watches every module, optimizer and scaler of the process that it is in.

    Args:
        writer: where the records go.
        watch: False records no more than losses, steps and what ended the process.
        budget: says what is measured in each step; None for everything.
        changes: are in force meanwhile.
        digest: of what the program trains.
    """

    def __init__(
        self,
        writer: TraceWriter,
        *,
        watch: bool = True,
        budget: Budget | None = None,
        changes: "Changes | None" = None,
        digest: StepDigest | None = None,
    ) -> None:
        self._writer = writer
        self._changes = changes
        self._digest = digest
        self.instruments = Instruments(writer, watch=watch, budget=budget)
        self._compiler = CompileWatch()
        self._compiling = False
        self._loss: float | None = None
        self._scaled: MemoryRef | None = None
        self._hears = False
        """Whether the number of the loss from which a backward pass begins has been asked for."""
        self._trainer_known = False
        self._step_began = perf_counter()
        self._memory = resident()
        self._described = False
        self._owner = getpid()
        self._running = False
        self._waiting: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begins to watch."""
        instruments = self.instruments
        if self._digest is not None:
            instruments.phases.after_step.append(self._digest.add)
        if self._changes is not None:  # before the instruments, which then see what they make of the program
            self._changes.begin()
            instruments.modules.before_root.append(self._changes.offer)
        instruments.modules.before_first.append(self._describe)
        instruments.modules.error_has_left = hide_own_frames
        instruments.hears_loss = self._hears_loss
        instruments.phases.before_backward.append(self._note_loss)
        instruments.phases.on_scaled.append(self._note_scaled)
        instruments.phases.after_step.append(self._note_step)
        instruments.phases.after_scaler.append(self._note_skipped)
        self._running = True
        instruments.start()
        self._waiting = [
            after_import(FRAME_COMPILER, self._compiler_is_there),
            after_import(COMPILER, self._keep_compiler_out),
            *instruments.checks.follow_imports(after_import),
            after_import(GENERATION, instruments.phases.follow_generate),
            TestRunners(self._writer.next_n, self._note_test, self._note_passed).follow(),
            follow_threads(self._note_thread_ends),
        ]
        at_fork(after_in_child=self._be_quiet)

    def finish(self, error: BaseException | None, libraries: Sequence[str] = ()) -> Totals:
        """Stops watching, and writes what only the end knows; see :class:`dtypedoctor.worker.recording.Watch`."""
        if isinstance(error, SystemExit):
            self._note_exit(error)
            error = None
        self._running = False
        for stop_waiting in self._waiting:
            stop_waiting()
        keeping = self.instruments.guard.keeping  # of what goes wrong here, the rest is written all the same
        with keeping(END_OF_PROGRAM):
            self.instruments.stop()
            self._note_steps()
        with keeping("what ended the program"):
            if error is not None:
                self.instruments.note_exception(error)
        with keeping("the environment at the end"):
            self._writer.write(Environment(values=describe_environment(torch.device(self._device()))))
        if not self.instruments.names.count:
            where = " outside of compiled code" if self.instruments.coverage.compiled_outside else ""
            self._writer.write(NotWatched(what="modules", why=f"no torch.nn.Module was called{where}"))
        with keeping("kernels that torch does not know"):
            for what, why in own_kernels(libraries):
                self._writer.write(NotWatched(what=what, why=why))
        with keeping("what the compiler gave up on"):
            self._note_compiled()
        if self._changes is not None:
            self._changes.end()
        totals = Totals(
            steps=self.instruments.position.step - 1,
            device=self._device(),
            peak_memory=self._peak_memory(),
            checksum=self._digest.value if self._digest is not None else None,
        )
        with keeping("fixes of the failing call"):
            if any(self.instruments.in_place.written.values()):
                from dtypedoctor.worker.call_fixes import (
                    try_on_capsules,  # the corrections, which a healthy run never needs
                )

                try_on_capsules(self._writer.directory)
        return totals

    def _note_exit(self, leaving: SystemExit) -> None:
        """The program leaves with a status of its own: what it was handling, or a test runner has reported, is recorded if it failed."""
        if leaving.code in (None, 0):
            return
        self.instruments.note_behind(leaving)
        reported = getattr(sys, "last_value", None)
        if isinstance(reported, BaseException):
            self._note_reported(reported)

    def _note_steps(self) -> None:
        """Writes down how many steps several optimizers have made, which the number of the last step does not tell."""
        phases = self.instruments.phases
        if phases.optimizers > 1:
            steps = OptimizerSteps(optimizers=phases.optimizers, done=phases.done, skipped=phases.skipped)
            self.instruments.session.emit(steps, phase="optimizer")

    def _note_test(self, failure: BaseException) -> None:
        if os.getpid() == self._owner:
            self.instruments.guard.shield(self._note_reported, "what failed in a test")(failure)

    def _note_passed(self, since: int, expects: bool) -> None:
        if os.getpid() == self._owner:
            passed = TestPassed(since=since, expects=expects)
            self.instruments.guard.shield(self.instruments.session.emit, "a test that passes")(passed)

    def _note_thread_ends(self, error: BaseException) -> None:
        if os.getpid() == self._owner:
            self.instruments.guard.shield(self.instruments.note_thread_ends, "what ended a thread")(error)

    def _note_reported(self, error: BaseException) -> None:
        """An exception that a test runner or a console shows as a failure."""
        self.instruments.note_caught(error, ending=True)
        self.instruments.note_behind(error)

    def _device(self) -> str:
        """``cuda`` if the process has used CUDA so far, else ``cpu``. Asking does not initialise CUDA."""
        return "cuda" if torch.cuda.is_initialized() else "cpu"

    def _peak_memory(self) -> int:
        """Bytes over what the process took when watching began; on CUDA, the peak of torch's allocator."""
        if self._device() == "cuda":
            return torch.cuda.max_memory_allocated()
        return max(0, peak_resident() - self._memory)

    def _be_quiet(self) -> None:
        """A forked child (a data loader's worker, say) is not watched: the trace is its parent's."""
        self.instruments.position.muted = FOR_GOOD

    def _describe(self, module: nn.Module) -> None:
        """Writes the environment when it matters, and not earlier: a program may still set it up after importing torch."""
        if not self._described:
            self._described = True
            self._writer.write(Environment(values=describe_environment(torch.device(self._device()))))

    def _note_loss(self, tensors: list[Tensor]) -> None:
        if not self._trainer_known and "transformers.trainer" in sys.modules:
            # Writes down that a Trainer runs this backward pass which leaves losses that are not finite out of its log
            frame: FrameType | None = sys._getframe()
            while frame is not None and not frame.f_code.co_filename.endswith("transformers/trainer.py"):
                frame = frame.f_back
            trainer = frame.f_locals.get("self") if frame is not None else None
            self._trainer_known = trainer is not None
            if getattr(getattr(trainer, "args", None), "logging_nan_inf_filter", False) is True:
                self.instruments.session.emit(LogFilter(trainer=type(trainer).__name__))
        asked, self._hears = self._hears, False
        if len(tensors) == 1 and not (asked or self._is_scaled(tensors[0])):
            self._ask_for(tensors[0])

    def _hears_loss(self, loss: Tensor) -> Callable[[float], None]:
        self._hears = True
        return (lambda _: None) if self._is_scaled(loss) else self._take_loss

    def _is_scaled(self, loss: Tensor) -> bool:
        return self._scaled is not None and self._scaled.is_of(loss)

    def _note_scaled(self, scaled: Tensor, loss: Tensor) -> None:
        """A scaler multiplies the loss: the program's own is the one before, and a backward pass from the other tells no new one."""
        self._scaled = MemoryRef(scaled)
        self._ask_for(loss)

    def _ask_for(self, tensor: Tensor) -> None:
        loss = values_of(tensor)
        if loss is not None and loss.numel() == 1:  # inside of vmap it holds one for each row
            self.instruments.arrivals.ask(loss, self._take_loss)

    def _take_loss(self, loss: float) -> None:
        self._loss = loss

    def _note_skipped(self, ended: ScalerStep) -> None:
        """A step that a scaler does not let the optimizer take had a loss as well, and takes time."""
        if not ended.called:
            self._note_step(ended.optimizer)

    def _note_step(self, optimizer: Optimizer) -> None:
        now = perf_counter()
        seconds, self._step_began = now - self._step_began, now
        n, step = self._writer.next_n(), self.instruments.position.step
        self.instruments.arrivals.afterwards(lambda: self._write_step(n, step, seconds))

    def _write_step(self, n: int, step: int, seconds: float) -> None:
        values = {"step_time": seconds}
        if self._loss is None or isfinite(self._loss):
            if self._loss is not None:
                values["loss"] = self._loss
            self._writer.write_metric(n, step, values)
        else:
            spelled = {"loss": str(self._loss)}
            self._writer.write(Metric(n=n, step=step, values=values, nonfinite=["loss"], spelled=spelled))

    def _keep_compiler_out(self) -> None:
        keep_compiler_out()
        self.instruments.collectives.keep_compiler_out()
        self.instruments.phases.follow_compiled()

    def _compiler_is_there(self) -> None:
        if self._running and self.instruments.watching and getpid() == self._owner:
            self._compiler.__enter__()
            self._compiling = True

    def _note_compiled(self) -> None:
        if not self._compiling:
            return
        self._compiler.__exit__(None, None, None)
        observations = list(self._compiler.observations(self.instruments.code_places.module_at))
        graphs = self._compiler.unique_graphs
        if not graphs and len(observations) == 1:  # there is nothing but their number
            return
        for what, fqn in observations:
            self.instruments.session.emit(what, fqn=fqn, phase="compile")
        if graphs:
            self._writer.write(
                NotWatched(
                    what=f"the inside of {graphs} compiled graph(s)",
                    why="compiled code runs no module hooks; inputs and outputs of instrumented modules were measured",
                )
            )


Told = Callable[[BaseException], None]


def follow_threads(tell: Told) -> Callable[[], None]:
    """Has ``tell`` called with each exception that ends a thread, in that thread; returns what ends that.

    ``threading.excepthook`` is called as before and stays what it is; the traceback that it gets is without this package's frames. Where the interpreter
    has another way of calling it, nothing is told.
    """
    listener: Told | None = tell
    wrapped: list[tuple[threading.Thread, object, object]] = []

    def stop() -> None:
        # threads that live on, the main one among them, would keep the whole watch alive
        nonlocal listener
        listener = None
        if getattr(threading, _MAKE, None) is make:
            setattr(threading, _MAKE, original)
        for thread, ours, before in wrapped:
            if getattr(thread, _INVOKE, None) is ours:
                setattr(thread, _INVOKE, before)
        wrapped.clear()

    def told(invoke: Callable[..., None]) -> Callable[..., None]:
        def invoke_excepthook(thread: threading.Thread) -> None:
            error = sys.exc_info()[1]
            if listener is not None and error is not None and not isinstance(error, SystemExit):
                listener(error)
                hide_own_frames(error)
            invoke(thread)

        return invoke_excepthook

    original = getattr(threading, _MAKE, None)
    if original is None:
        return lambda: None

    def make() -> Callable[..., None]:
        return told(original())

    setattr(threading, _MAKE, make)
    for thread in threading.enumerate():  # this one may be of the program, and it may import torch in it
        if hasattr(thread, _INVOKE):
            before = getattr(thread, _INVOKE)
            wrapped.append((thread, told(before), before))
            setattr(thread, _INVOKE, wrapped[-1][1])
    return stop


_MAKE, _INVOKE = "_make_invoke_excepthook", "_invoke_excepthook"
"""In ``threading``: what makes the function that a new thread calls when an exception ends it, and the thread's attribute that holds it."""


__unittest = True
"""unittest leaves frames of such a module out of the tracebacks that it shows."""

_NOT_FINITE = re.compile(r"\b(nan|inf)\b")
_EXPECTING = ("_pytest.raises", "_pytest.python_api", "unittest.case")
"""Hold the classes of what ``pytest.raises`` and ``assertRaises`` return; the second does for pytest before 8.4."""
Undo = Callable[[], None]


class TestRunners:
    """Tells how tests end.

    Args:
        now: gives the number of the next record.
        failed: is called with each exception that a runner takes for a test's failure.
        passed: is called where a test, or a part of one, has ended as it should, with the number of a record before it began and whether that part
            is what the test expects: an exception, or an output that names inf or NaN.
    """

    def __init__(
        self, now: Callable[[], int], failed: Callable[[BaseException], None], passed: Callable[[int, bool], None]
    ) -> None:
        self._now, self._failed, self._passed = now, failed, passed
        self._began: dict[int, int] = {}
        """The number of a record before what is going on began, by the identity of the context, result or runner that ends it."""
        self._undo: list[Undo] = []

    def follow(self) -> Undo:
        """Follows those that the program imports; returns what ends that."""
        waiting = [
            after_import("_pytest.runner", self._follow_pytest),
            after_import("unittest.result", self._follow_unittest),
            after_import("doctest", lambda: self._follow_doctest(sys.modules["doctest"])),
            *(after_import(name, partial(self._follow_expected_errors, name)) for name in _EXPECTING),
        ]

        main = sys.modules["__main__"]
        if getattr(main.__spec__, "name", "") == "doctest":  # of `python -m doctest`, whose classes no import brings
            self._follow_doctest(main)

        def stop() -> None:
            for end in (*waiting, *self._undo):
                end()

        return stop

    def _ended(self, what: object, *, expects: bool) -> None:
        began = self._began.pop(id(what), None)  # None where it began before it was followed
        if began is not None:
            self._passed(began, expects)

    def _replace(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        original = owner.__dict__[name]
        setattr(owner, name, wraps(original)(make(original)))
        self._undo.append(lambda: setattr(owner, name, original))

    def _follow_pytest(self) -> None:
        from _pytest.runner import CallInfo

        original = CallInfo.__dict__["from_call"]

        @wraps(original.__func__)
        def from_call(cls: Any, *args: Any, **kwargs: Any) -> Any:
            began = self._now()
            result = original.__func__(cls, *args, **kwargs)
            if result.excinfo is not None:
                self._failed(result.excinfo.value)
            else:
                self._passed(began, False)
            return result

        CallInfo.from_call = classmethod(from_call)  # type: ignore[assignment,method-assign]
        self._undo.append(lambda: setattr(CallInfo, "from_call", original))

    def _follow_unittest(self) -> None:
        from unittest.result import TestResult

        def failing(original: Callable[..., None]) -> Callable[..., None]:
            def add(result: TestResult, *args: Any) -> None:
                error = args[-1][1] if args and args[-1] is not None else None  # None of a part of a test that passes
                if error is not None:
                    self._failed(error)
                original(result, *args)

            return add

        def starting(original: Callable[..., None]) -> Callable[..., None]:
            def start(result: TestResult, *args: Any) -> None:
                self._began[id(result)] = self._now()
                original(result, *args)

            return start

        def passing(original: Callable[..., None]) -> Callable[..., None]:
            def add(result: TestResult, *args: Any) -> None:
                self._ended(result, expects=False)
                original(result, *args)

            return add

        for name in ("addError", "addFailure", "addSubTest"):
            self._replace(TestResult, name, failing)
        self._replace(TestResult, "startTest", starting)
        self._replace(TestResult, "addSuccess", passing)

    def _follow_expected_errors(self, module: str) -> None:
        """Follows `pytest.raises` or `assertRaises`: what lies inside is expected where they take an exception."""

        def entering(original: Callable[..., Any]) -> Callable[..., Any]:
            def enter(context: Any) -> Any:
                self._began[id(context)] = self._now()
                return original(context)

            return enter

        def leaving(original: Callable[..., Any]) -> Callable[..., Any]:
            def leave(context: Any, *raised: Any) -> Any:
                __tracebackhide__ = True  # of pytest
                taken = original(context, *raised)
                if taken and raised[0] is not None:
                    self._ended(context, expects=True)
                return taken

            return leave

        classes = [value for value in vars(sys.modules[module]).values() if isinstance(value, type)]
        for expected in classes:
            if expected.__module__ == module and {"__enter__", "__exit__"} <= expected.__dict__.keys():
                self._replace(expected, "__enter__", entering)
                self._replace(expected, "__exit__", leaving)

    def _follow_doctest(self, doctest: ModuleType) -> None:
        def starting(original: Callable[..., None]) -> Callable[..., None]:
            def start(runner: "DocTestRunner", out: Any, test: Any, example: "Example") -> None:
                self._began[id(runner)] = self._now()
                original(runner, out, test, example)

            return start

        def passing(original: Callable[..., None]) -> Callable[..., None]:
            def succeed(runner: "DocTestRunner", out: Any, test: Any, example: "Example", got: str) -> None:
                expects = example.exc_msg is not None or _NOT_FINITE.search(example.want) is not None
                self._ended(runner, expects=expects)
                original(runner, out, test, example, got)

            return succeed

        self._replace(doctest.DocTestRunner, "report_start", starting)
        self._replace(doctest.DocTestRunner, "report_success", passing)
