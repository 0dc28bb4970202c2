"""Notices what a program does besides calling modules: backward passes, optimizer and scaler steps, generation; threads that begin and end;
tensors that are read as a whole.

Functions are wrapped while the watch runs and put back afterwards; the wrapped function is called exactly as it was.
"""

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from types import CodeType, FrameType
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from dtypedoctor._torch_private import (
    BEGINS_PROFILING,
    COMPILER,
    ENDS_PROFILING,
    MODES_CAN_IGNORE_COMPILED,
    EntersCompiled,
    before_compiled,
    found_inf_by,
    kind_of,
    modes_on,
    register_own,
)
from dtypedoctor.instrument.frames import is_own_file
from dtypedoctor.instrument.operators import OperatorMode
from dtypedoctor.instrument.session import Guard, Session, begin_thread, steps_running
from dtypedoctor.instrument.untouched import CannotReplayError
from dtypedoctor.interruptions import noticing
from dtypedoctor.unpatched import unseen_by_warnings

Listener = Callable[[], None]
MOST_LINES = 256
"""Lines that leave gradients off which are known."""


class OfThread(threading.local):
    """The sentinel of one thread; in a ``with`` block of it the sentinel looks at nothing, for the doctor is at work, or a gradient scaler.

    Attributes:
        sentinel: None in a thread that autograd or another library has started, and in a daemon.
    """

    sentinel: Any = None

    def __enter__(self) -> None:
        if self.sentinel is not None:
            self.sentinel.pause()

    def __exit__(self, *_: object) -> None:
        if self.sentinel is not None:
            self.sentinel.resume()


@dataclass(slots=True, kw_only=True)
class ScalerStep:
    """A step of an enabled gradient scaler.

    Attributes:
        step: number of the optimizer step that it asked for.
        called: whether it called the optimizer.
        found_inf: per device, what a fused optimizer that it called reads to know whether the gradients hold inf or NaN; empty for others.
    """

    scaler: Any
    optimizer: Optimizer
    step: int
    called: bool
    found_inf: Sequence[Tensor]


def _line_outside_of_torch(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """Where torch was called from; None where it was by this package."""
    while frame is not None and _module_of(frame).startswith((__name__, "torch.")):
        frame = frame.f_back
    return None if frame is None or _module_of(frame).startswith("dtypedoctor.") else (frame.f_code, frame.f_lineno)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


class Phases:
    """Keeps ``position.step`` and ``position.phase``.

    Attributes:
        before_backward: called with the tensors that a backward pass starts from.
        inside_backward: called with those of a backward pass inside of another, as a reentrant checkpoint makes one.
        after_backward: called when the outermost backward pass has ended, also by an exception.
        before_step, after_step: called with the optimizer around its step.
        before_unscale: called with the scaler and the optimizer whose gradients are about to be unscaled.
        on_gradients: called with what ``torch.autograd.grad`` returns, where it is called outermost.
        of_thread: has the sentinel of this thread, which is paused around all of these, and around what a gradient scaler does.
        after_scaler: called with the :class:`ScalerStep` that has ended.
        step_begins: called when the number of the step has changed.
        without_gradients: called where a line leaves gradients off that has not done so before: an evaluation, an export, a sampler.
        on_scaled: called with a tensor that a gradient scaler has multiplied, and the tensor before.
        on_failure: called with an exception that leaves a backward pass, a generation or a scaler, once.
        in_scaler: whether a gradient scaler is stepping an optimizer.
        failure: identity of the last exception that left a backward pass, a generation or a scaler, and that phase.
    """

    def __init__(self, session: Session) -> None:
        self._position, self._guard = session.position, session.guard
        self._undo: list[Callable[[], None]] = []
        self._steps: Counter[int] = Counter()
        self._known: WeakSet[Any] = WeakSet()
        self._last: Callable[[], Any] = lambda: None
        """The optimizer that has stepped last."""
        self.optimizers = self.done = self.skipped = 0
        """How many optimizers have made steps, steps of all of them, and those that a gradient scaler did not let them make."""
        self._first = 1
        self._wrapped_generate = False
        self._stands_aside = self._forward_only = False
        self.before_generate: list[Callable[[tuple[Any, ...], dict[str, Any]], None]] = []
        self.before_backward: list[Callable[[list[Tensor]], None]] = []
        self.inside_backward: list[Callable[[list[Tensor]], None]] = []
        self.after_backward: list[Listener] = []
        self.before_step: list[Callable[[Optimizer], None]] = []
        self.after_step: list[Callable[[Optimizer], None]] = []
        self.in_scaler = False
        self.failure: tuple[int, str] = (0, "")
        self.on_failure: list[Callable[[BaseException], None]] = []
        self.before_unscale: list[Callable[[Any, Optimizer], None]] = []
        self.after_scaler: list[Callable[[ScalerStep], None]] = []
        self.on_scaled: list[Callable[[Tensor, Tensor], None]] = []
        self.on_gradients: list[Callable[[Any], None]] = []
        self.of_thread = OfThread()
        self.step_begins: Listener = _nothing
        self.without_gradients: Listener = _nothing
        self._without: set[tuple[Any, int]] = set()
        self.compiled_begins: Listener = _nothing
        self.compiled_called: Callable[[EntersCompiled], None] = lambda _: None
        self._ignore_compiled: Callable[[], None] | None = None

    def start(self) -> None:
        """Wraps backward, optimizer and scaler steps of the process."""
        self._wrap(torch.autograd, "backward", self._around_backward)
        self._wrap(torch.autograd, "grad", self._around_backward)
        self._wrap(torch.amp.GradScaler, "scale", self._around_scale)
        self._wrap(torch.amp.GradScaler, "step", self._around_scaler_step)
        self._wrap(torch.amp.GradScaler, "unscale_", self._around_unscale)
        self._wrap(torch.inference_mode, "__enter__", self._around_entering)
        if hasattr(profiler, BEGINS_PROFILING) and hasattr(profiler, ENDS_PROFILING):
            self._wrap(profiler, BEGINS_PROFILING, self._profiler_begins)
            self._wrap(profiler, ENDS_PROFILING, self._profiler_ends)
        if not MODES_CAN_IGNORE_COMPILED:
            self._wrap(torch, "compile", self._around_compile)
        self.follow_compiled()
        pre = register_own(register_optimizer_step_pre_hook, self._pre_step)
        post = register_own(register_optimizer_step_post_hook, self._post_step)
        self._undo += [pre.remove, post.remove]

    def stop(self) -> None:
        """Puts everything back as it was."""
        while self._undo:
            self._undo.pop()()
        self._wrapped_generate = False
        self._ignore_compiled = None

    @contextmanager
    def standing_aside(self) -> Iterator[None]:
        """Inside, a backward pass is not followed: a call of the program is made again."""
        failure = self.failure
        self._stands_aside = True
        try:
            yield
        finally:
            self._stands_aside, self.failure = False, failure

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        """Inside, a call of the program is made again that must not train: a backward pass or an optimizer step ends it."""
        self._forward_only = True
        try:
            with self.of_thread:
                yield
        finally:
            self._forward_only = False

    def _may_train(self) -> None:
        if self._forward_only:
            raise CannotReplayError("it trains")

    def restart(self, step: int) -> None:
        """Training begins anew, with optimizers of its own; its first step is number ``step``."""
        self._steps.clear()
        self._first = step
        self.begin_step(step)

    def begin_step(self, step: int) -> None:
        """A step begins."""
        self._position.step = step
        self.step_begins()

    def follow_generate(self) -> None:
        """Wraps transformers' ``generate`` once transformers is there; cheap to call again."""
        if self._wrapped_generate:
            return
        utils = sys.modules.get("transformers.generation.utils")
        mixin = getattr(utils, "GenerationMixin", None)
        if mixin is None:
            return
        self._wrapped_generate = True
        self._wrap(mixin, "generate", self._around_generate)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        @unseen_by_warnings
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        self._undo.append(lambda: setattr(owner, name, original))

    @unseen_by_warnings
    def _around_entering(self, original: Callable[..., Any], region: Any) -> Any:
        """A program that has trained and goes on to something else, in other dtypes maybe, tells nobody, but it needs no gradients for that. ``no_grad`` would say so, too,
        but optimizers and FSDP enter it in each step."""
        result = original(region)
        if not (is_compiling() or self._position.muted or self._position.backward_depth or self._position.overrides):
            at = _line_outside_of_torch(sys._getframe())
            if at is not None and at not in self._without and len(self._without) < MOST_LINES:
                self._without.add(at)
                with self._guard.keeping("what follows where gradients are left off"):
                    self.without_gradients()
                self._settle()
        return result

    @unseen_by_warnings
    def _around_backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        position = self._position
        here = position.of.here or position.last
        self._may_train()
        if is_compiling() or here.muted or position.silenced or self._stands_aside:
            if position.silenced:
                position.silent_work()
            return original(*args, **kwargs)
        first = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
        tensors = [first] if isinstance(first, Tensor) else [t for t in (first or ()) if isinstance(t, Tensor)]
        for tensor in tensors:
            if type(tensor) is not Tensor and kind_of(type(tensor)) in ("fake", "functional"):
                # the compiler traces a backward pass; torch 2.9 does not say so by is_compiling()
                return original(*args, **kwargs)
        if here.overrides:
            self.forget_ended_steps()
        depth = here.backward_depth
        if listeners := self.inside_backward if depth else self.before_backward:
            self._tell(listeners, "some losses", tensors)
        result = None
        try:
            position.last = here
            here.backward_depth = depth + 1
            with self._noting_failure("backward"):
                self._settle()
                result = original(*args, **kwargs)
        finally:
            here.backward_depth = depth  # no property: an interruption at the beginning of its function would leave the pass open for good
            position.last = here
            if not depth:
                if result is not None:  # of ``torch.autograd.grad``
                    self._tell(self.on_gradients, "some gradients", result)
                self._tell(self.after_backward, "the end of some backward passes")
        return result

    def _around_compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        compiled = original(*args, **kwargs)
        self.follow_compiled()
        return compiled

    def follow_compiled(self) -> None:
        """Hears of calls of compiled functions, once they can be there; with a torch that cannot run them beside a mode they run beside none.
        Cheap to call again."""
        if self._ignore_compiled is not None or COMPILER not in sys.modules:
            return
        ignore: Listener = _nothing if MODES_CAN_IGNORE_COMPILED else lambda: self.compiled_begins()

        def heard(entered: EntersCompiled) -> None:
            ignore()
            self.compiled_called(entered)

        self._ignore_compiled = before_compiled(heard, otherwise=ignore)
        self._undo.append(self._ignore_compiled)

    @unseen_by_warnings
    def _around_generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        overrides = self._position.overrides
        open_before = len(overrides)
        self._tell(self.before_generate, "some generated texts", args, kwargs)
        try:
            with self._noting_failure("generate"):
                overrides.append("generate")
                return original(*args, **kwargs)
        finally:
            del overrides[open_before:]

    @unseen_by_warnings
    def _around_scale(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if isinstance(outputs, Tensor) and isinstance(scaled, Tensor) and scaled is not outputs:
            self._tell(self.on_scaled, "a loss before it was scaled", scaled, outputs)
        return scaled

    @unseen_by_warnings
    def _around_scaler_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any,
                            **kwargs: Any) -> Any:  # fmt: skip
        if not scaler.is_enabled():  # it steps the optimizer, as the program itself could
            return original(scaler, optimizer, *args, **kwargs)
        inner = getattr(optimizer, "optimizer", optimizer)
        before, step = self._steps[id(inner)], self._position.step
        self.in_scaler = True
        self._settle()
        try:
            with self._noting_failure("optimizer"):
                result = original(scaler, optimizer, *args, **kwargs)
        finally:
            self.in_scaler = False
            self._settle()
        called = self._steps[id(inner)] > before
        found_inf = found_inf_by(scaler, optimizer) if called else ()
        ended = ScalerStep(scaler=scaler, optimizer=inner, step=step, called=called, found_inf=found_inf)
        self._tell(self.after_scaler, "the gradient scaler", ended)
        if not called:
            self._count(inner, skipped=True)
        return result

    def uncount(self) -> None:
        """An optimizer that was called has left its parameters as they were, since a scaler had found inf in their gradients."""
        self.done -= 1
        self.skipped += 1

    @unseen_by_warnings
    def _around_unscale(self, original: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
        if not scaler.is_enabled():
            return original(scaler, optimizer)
        self._tell(self.before_unscale, "what the gradient scaler unscales", scaler, optimizer)
        with self.of_thread, self._noting_failure("optimizer"):
            return original(scaler, optimizer)

    def _profiler_begins(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Takes the modes off before a profiler begins: it would count each operator that they pass on a second time."""
        self._guard.tell("operators while a profiler runs", "it would count each of them twice; run once without it")
        self._profiled(True)
        began = False
        try:
            result = original(*args, **kwargs)
            began = True
        finally:
            self._profiled(began)
        return result

    def _profiler_ends(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            self._profiled(False)

    def _profiled(self, on: bool) -> None:
        if self._guard.profiled is not on:  # one that has begun before the watch did ends without having been heard of
            self._guard.profiled = on
            if (sentinel := self.of_thread.sentinel) is not None:
                (sentinel.pause if on else sentinel.resume)()

    def _noting_failure(self, phase: str) -> noticing:
        return noticing(lambda error: self._note_failure(error, phase))

    def _note_failure(self, error: BaseException, phase: str) -> None:
        if self.failure[0] != id(error):
            self.failure = (id(error), phase)
            self._tell(self.on_failure, "exceptions that the program may have caught", error)

    def forget_ended_steps(self, running: int = 0) -> None:
        """Ends the phase of optimizer steps that an exception has left, of which torch tells nobody.

        Args:
            running: how many optimizer steps are running.
        """
        overrides = self._position.overrides
        while overrides and overrides[-1] == "optimizer" and steps_running() <= running:
            overrides.pop()

    def _pre_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """An optimizer step begins. With a closure the program's forward and backward pass run in it, and it really begins when they are over."""
        if is_compiling():  # Dynamo would make what follows a part of the program's compiled step
            return None
        self._may_train()
        if self._position.overrides:
            self.forget_ended_steps(1)
        closure = kwargs.get("closure") or next(filter(callable, args[1:2]), None)
        if closure is None:
            self._step_begins(optimizer)
            return None
        is_first = True

        @functools.wraps(closure, updated=())
        def evaluated(*values: Any, **named: Any) -> Any:
            nonlocal is_first
            if not is_first:
                if self._position.overrides[-1:] == ["optimizer"]:
                    self._position.overrides.pop()
                self._settle()
            loss = closure(*values, **named)
            if is_first:
                is_first = False
                self._step_begins(optimizer)
            else:
                self._enter_step()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _step_begins(self, optimizer: Optimizer) -> None:
        self._tell(self.before_step, "gradients before some optimizer steps", optimizer)
        self._enter_step()

    def _enter_step(self) -> None:
        self._position.overrides.append("optimizer")
        self._settle()

    def _post_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_compiling():
            return
        overrides = self._position.overrides
        if overrides and overrides[-1] == "optimizer":
            overrides.pop()
        self._tell(self.after_step, "parameters after some optimizer steps", optimizer)
        self._count(optimizer)

    def _tell(self, listeners: list[Any], what: str, *facts: Any) -> None:
        sentinel = self.of_thread.sentinel
        if sentinel is None or not (sentinel.on or self._position.looks):  # as always between looks
            self._guard.tell_each(listeners, what, *facts)
        else:
            with self.of_thread:
                self._guard.tell_each(listeners, what, *facts)

    def _settle(self) -> None:
        """The position has changed: the sentinel goes where it belongs now."""
        sentinel = self.of_thread.sentinel
        if sentinel is not None and (sentinel.on or self._position.looks):
            sentinel.settle()

    def _count(self, optimizer: Optimizer, *, skipped: bool = False) -> None:
        """Counts a step; with several optimizers (one per network, say) the busiest one gives the step number."""
        overrides = self._position.overrides
        if not overrides or overrides[-1] != "optimizer":  # one that steps another is counted, and that one is not
            if self._last() is not optimizer:
                self._last = ref(optimizer)
                with self._guard.keeping("the number of optimizers"):
                    self.optimizers += optimizer not in self._known
                    self._known.add(optimizer)
            self.skipped += skipped
            self.done += not skipped
        done = self._steps[id(optimizer)] = self._steps[id(optimizer)] + 1
        if self._first + done > self._position.step:
            self.begin_step(self._first + done)


def _nothing() -> None:
    """Stands for a listener that nobody has named."""


DAEMONS = "operators in daemon threads"
NO_MODE = "a dispatch mode that is active when Python ends a daemon thread would abort the program; use daemon=False to have them measured"


class Threads:
    """Calls back in each thread that Python starts, where it begins and where it ends.

    torch keeps a stack of modes for each thread. One that is still on it when a thread ends is freed by C++ code that waits for the interpreter,
    and a program that is about to end is aborted there: none may be left. Daemons get no mode of their own for this reason.

    Args:
        guard: keeps errors from the program.
        begins: called in a new thread that is no daemon.
        ends: called in the same thread when it has run.
    """

    def __init__(self, guard: Guard, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        self._guard = guard
        self._begins = guard.shield(begins, "operators in some threads")
        self._ends = guard.shield(ends, "operators in some threads")
        self._original: Any = None
        self._wrapper: Any = None

    def start(self) -> None:
        """Begins to follow threads."""
        self._original = original = Thread._bootstrap_inner  # type: ignore[attr-defined]

        def _bootstrap_inner(thread: Thread) -> None:
            if self._wrapper is None:  # stopped
                original(thread)
                return
            begin_thread()
            if not thread.daemon:
                self._begins()
            elif _is_of_the_program(thread):
                self._guard.tell(DAEMONS, NO_MODE)
            try:
                original(thread)
            finally:
                self._ends()
                remove_modes()

        self._wrapper = Thread._bootstrap_inner = _bootstrap_inner  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Puts back what was replaced; threads that have begun end as they would have."""
        if self._wrapper is not None and Thread._bootstrap_inner is self._wrapper:  # type: ignore[attr-defined]
            Thread._bootstrap_inner = self._original  # type: ignore[attr-defined]
        self._wrapper = None


def remove_modes() -> None:
    """Takes every mode of the doctor's off the stack of this thread."""
    for mode in modes_on():
        if isinstance(mode, OperatorMode):
            OperatorMode.leave(mode)


def _is_of_the_program(thread: Thread) -> bool:
    """Whether what a thread runs is the program's own code: neither the doctor's, nor Python's, nor that of an installed package."""
    target = getattr(thread, "_target", None) or type(thread).run
    code = getattr(getattr(target, "__func__", target), "__code__", None)
    return is_own_file(getattr(code, "co_filename", "<"))


SHOWN = "shown"
"""A tensor is printed."""
WAYS = {"numpy": "numbers", "tolist": "numbers", "__reduce_ex__": "saved", "__repr__": SHOWN}
"""Methods by which values leave, and what that is called in the trace."""


class Exports:
    """Calls back with each tensor that leaves torch: for numpy, as numbers in a list, into a file or to another process.

    No operator runs when a tensor is read like that, or none that a mode sees. The methods that do it are wrapped once something is known not to be
    finite, or to have lost its digits: a program in which everything is right runs with torch's own.

    Args:
        guard: keeps errors from the program.
        left: called with the way, as :data:`WAYS` has it, and the tensor.
    """

    def __init__(self, guard: Guard, left: Callable[[str, Tensor], None]) -> None:
        self._left = guard.shield(left, "values that leave torch")
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        """Begins to notice; cheap to call again."""
        if not self._undo:
            for name, way in WAYS.items():
                self._wrap(name, way)

    def stop(self) -> None:
        """Puts back what was replaced."""
        while self._undo:
            self._undo.pop()()

    def _wrap(self, name: str, way: str) -> None:
        original: Any = getattr(Tensor, name)
        own = name in vars(Tensor)

        def wrapper(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not _module_of(sys._getframe(1)).startswith("dtypedoctor."):  # which reads what it has measured
                self._left(way, tensor)
            return original(tensor, *args, **kwargs)

        wrapper.__name__, wrapper.__doc__ = name, original.__doc__
        wrapper.__qualname__ = original.__qualname__
        wrapper.__wrapped__ = original  # type: ignore[attr-defined]
        setattr(Tensor, name, wrapper)

        def undo() -> None:
            if vars(Tensor).get(name) is not wrapper:
                return  # the program has put something of its own there
            setattr(Tensor, name, original) if own else delattr(Tensor, name)

        self._undo.append(undo)
