"""Threads of the program: what belongs to a thread begins and ends with it.

torch keeps a stack of modes for each thread. One that is still on it when a thread ends is freed by C++ code that waits for the interpreter,
and a program that is about to end is aborted there: none may be left. Daemons get no mode of their own for this reason.
"""

import threading
from collections.abc import Callable
from threading import Thread
from typing import Any

from dtypedoctor._torch_private import modes_on
from dtypedoctor.instrument.guard import Guard
from dtypedoctor.instrument.operator_mode import OperatorMode
from dtypedoctor.instrument.position import begin_thread

STANDARD = threading.__file__.removesuffix("threading.py")
"""Where Python's own modules lie."""
DAEMONS = "operators in daemon threads"
NO_MODE = "a dispatch mode that is on when Python ends such a thread would abort the program; a thread that is no daemon is measured"


class Threads:
    """Calls back in each thread that Python starts, where it begins and where it ends.

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
    if str(getattr(target, "__module__", "")).startswith("dtypedoctor."):
        return False
    code = getattr(getattr(target, "__func__", target), "__code__", None)
    path: str = getattr(code, "co_filename", "<")
    return not path.startswith(("<", STANDARD)) and "site-packages" not in path
