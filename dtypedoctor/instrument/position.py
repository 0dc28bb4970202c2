"""Where the watched process is: training step, outermost call, phase, and the module calls that are open.

An exception may end a call without any hook being told: torch tells hooks of ``Exception`` alone, so not of Ctrl-C, and an interruption may
come before a hook has done anything. So the calls that are really running are found on Python's own stack (:func:`forget_ended_calls`).
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from threading import get_ident
from types import CodeType

from torch import nn
from torch.optim import Optimizer

from dtypedoctor._torch_private import CALL_CODE, call_is_replaced

FOR_GOOD = 1 << 30
"""``muted`` of a process in which nothing is ever recorded again."""


class Here:
    """What one thread of the program is doing.

    Attributes:
        thread: identity of the thread that has begun the outermost call which is open.
        call, stack, backward_depth, overrides, muted: as :class:`Position` says.
    """

    __slots__ = ("backward_depth", "call", "muted", "overrides", "stack", "thread")

    def __init__(self) -> None:
        self.thread = 0
        self.call = 0
        self.stack: list[nn.Module] = []
        self.backward_depth = 0
        self.overrides: list[str] = []
        self.muted = 0

    @property
    def phase(self) -> str:
        """The phase of a module call or op that happens now."""
        if self.overrides:
            return self.overrides[-1]
        if self.backward_depth:
            return "recompute" if self.stack else "backward"
        return "forward"


class _OfThread(threading.local):
    """``here`` of the thread that asks; None in one that Python has not started."""

    def __init__(self) -> None:
        self.here = None if is_foreign() else Here()


_starting = threading.local()


def begin_thread() -> None:
    """Python is about to start this thread, and has not entered it among its own yet."""
    _starting.now = True


def is_foreign() -> bool:
    """Whether Python has not started the thread that asks: autograd has some of its own."""
    thread = threading._active.get(get_ident())  # type: ignore[attr-defined]  # current_thread() would make an entry
    return (thread is None or isinstance(thread, threading._DummyThread)) and not hasattr(_starting, "now")


class Position:
    """Mutable coordinates, shared by all instruments of one process. All but the step belong to the thread that asks for them.

    Attributes:
        step: training step being worked on, from 1.
        call: number of the outermost module call being worked on, from 1 (0 before the thread's first).
        stack: the module calls that are open, outermost first.
        backward_depth: how many backward passes are running (more than one only when nested).
        overrides: phases set by enclosing wrappers (``generate``, ``optimizer``, ``probe``), innermost last.
        muted: while positive, nothing is recorded (the doctor's own work).
        silenced: nothing is ever recorded again in this process.
        silent_work: called when a module or a backward pass runs all the same.
        of, last: where :attr:`here` is found; hooks that every module call runs read them themselves, because a property is a call.
    """

    __slots__ = ("_calls", "last", "of", "silenced", "silent_work", "step")

    def __init__(self, step: int = 1, call: int = 0) -> None:
        self.step = step
        self.of = _OfThread()
        self.last = self.of.here or Here()
        self.last.call = call
        self._calls = count(call + 1)
        self.silenced = False
        self.silent_work: Callable[[], None] = lambda: None

    @property
    def here(self) -> Here:
        """What the thread that asks is doing. One that Python has not started, as those of autograd on CUDA, works for the thread whose
        backward pass began last, and which waits for it."""
        return self.of.here or self.last

    def begin_call(self) -> None:
        """An outermost call begins in this thread; no other one gets its number."""
        self.here.call = next(self._calls)

    @property
    def call(self) -> int:
        """Number of the outermost module call being worked on."""
        return self.here.call

    @property
    def stack(self) -> list[nn.Module]:
        """The module calls that are open."""
        return self.here.stack

    @property
    def overrides(self) -> list[str]:
        """Phases set by enclosing wrappers."""
        return self.here.overrides

    @property
    def backward_depth(self) -> int:
        """How many backward passes are running."""
        return self.here.backward_depth

    @backward_depth.setter
    def backward_depth(self, depth: int) -> None:
        self.last = here = self.here
        here.backward_depth = depth

    @property
    def muted(self) -> int:
        """Whether nothing is recorded."""
        return FOR_GOOD if self.silenced else self.here.muted

    @muted.setter
    def muted(self, depth: int) -> None:
        if depth >= FOR_GOOD:
            self.silenced = True
        else:
            self.here.muted = depth

    @property
    def phase(self) -> str:
        """The phase of a module call or op that happens now."""
        return self.here.phase

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Marks everything inside as belonging to ``phase``."""
        overrides = self.overrides
        open_before = len(overrides)
        try:
            overrides.append(phase)
            yield
        finally:
            del overrides[open_before:]

    def mute(self) -> "Muted":
        """Nothing inside is recorded."""
        return Muted(self)

    def unmute(self) -> None:
        """Records again after an interruption, whatever was muted when it came."""
        self.here.muted = 0


class Muted:
    """Mutes a position in a ``with`` block, for this thread.

    An interruption may come at the beginning of any function, so also of ``__exit__``: :meth:`Position.unmute` puts that right.
    """

    __slots__ = ("_here",)

    def __init__(self, position: Position) -> None:
        self._here = position.here

    def __enter__(self) -> None:
        self._here.muted += 1

    def __exit__(self, *_: object) -> None:
        if self._here.muted:
            self._here.muted -= 1


_STEP: CodeType = Optimizer.profile_hook_step(lambda self: None).__code__


def forget_ended_calls(stack: list[nn.Module], thread: int) -> None:
    """Removes the calls that are over from ``stack``, where the hook that is told of the beginning of a call runs.

    Args:
        stack: modules whose calls have begun, outermost first.
        thread: the thread that they were called in.
    """
    if call_is_replaced():
        return  # somebody has put a function of their own there
    here = thread == get_ident()
    del stack[max(0, _running(CALL_CODE, thread) - here) :]


def steps_running() -> int:
    """How many steps of optimizers, each inside of the one before, are running in this thread."""
    return _running(_STEP, get_ident())


def _running(code: CodeType, thread: int) -> int:
    """How often ``code`` is being executed in ``thread`` at this moment."""
    frame = sys._current_frames().get(thread)
    count = 0
    while frame is not None:
        count += frame.f_code is code
        frame = frame.f_back
    return count
