"""Signals that somebody sends to the doctor and means the script."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

from dtypedoctor.runner.terminal import Foreground

__all__ = ["PassedOn", "outliving"]

_OF_ONE_PROCESS = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL,
    signal.SIGTRAP, signal.SIGSYS, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTIN, signal.SIGTTOU,
}  # fmt: skip
"""Those that nobody can catch, and those by which the kernel tells a process of what it did itself."""

_PASSED: list[int] = sorted(signal.valid_signals() - _OF_ONE_PROCESS)

_TO_THE_GROUP = {signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH}
"""Those that a terminal or a shell sends to all processes of a job."""

_ASK_TO_END = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT}


class PassedOn:
    """Sends what this process is sent on to the script, from :meth:`to` on. Use as a context manager.

    A signal that this process ignores is ignored by the script as well, which has that from it.

    Args:
        resized: called before the script is told that the terminal has another size.
    """

    def __init__(self, resized: Callable[[], None]) -> None:
        self._resized = resized
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._before: dict[int, Any] = {}
        self._stopping = self._waking = False
        self.asked_to_end = 0
        """The first signal that asked the script to end; 0 where none did."""

    def __enter__(self) -> Self:
        self._before = dict(_replaced(_PASSED, self._pass_on))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def to(self, process: "subprocess.Popen[bytes]") -> None:
        """The script has been started; it is sent what came in the meantime."""
        self._process = process
        for number in self._early:
            self._send(number, process)

    def stop_together(self, foreground: Foreground | None) -> None:
        """Stops this process where the script has been stopped, by Ctrl-Z or SIGTSTP; both go on together."""
        if self._process is None or not (self._stopping or (foreground is not None and foreground.is_ours)):
            return
        if not _is_stopped(self._process):
            return
        self._stopping = False
        if foreground is not None:
            foreground.take_back()
        self._waking = True  # the SIGCONT that wakes this process is sent on below, once
        os.kill(os.getpid(), signal.SIGSTOP)  # here the shell takes over, until it says `fg`
        if foreground is not None:
            foreground.give()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)
        self._waking = False

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        if number in _ASK_TO_END:
            self.asked_to_end = self.asked_to_end or number
        if self._process is None:
            self._early.append(number)
        else:
            self._send(number, self._process)

    def _send(self, number: int, process: "subprocess.Popen[bytes]") -> None:
        if number == signal.SIGCONT and self._waking:
            return
        if number == signal.SIGWINCH:
            self._resized()
        self._stopping = self._stopping or number == signal.SIGTSTP
        with contextlib.suppress(ProcessLookupError):
            if number in _TO_THE_GROUP:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)


@contextlib.contextmanager
def outliving() -> Iterator[None]:
    """Inside, signals that are none of this process's business do not end it while no script is running."""
    before = dict(_replaced([n for n in _PASSED if n not in {*_ASK_TO_END, *_TO_THE_GROUP}], lambda *_: None))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _replaced(numbers: list[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[tuple[int, Any]]:
    """Sets a handler for each signal that is not ignored, and gives what was set before."""
    for number in numbers:
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            yield number, signal.signal(number, handler)


def _is_stopped(process: "subprocess.Popen[bytes]") -> bool:
    try:
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG) is not None
    except ChildProcessError:  # it has ended
        return False
