"""Runs a command in a process group of its own, from which nothing takes this process away that a shell would give it.

Signals that are sent to this process go to the command, it has the terminal, what it writes is shown and kept, and it ends
where this process is killed.
"""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, Self

from dtypedoctor.runner.ending import end
from dtypedoctor.runner.run import WorkerExit
from dtypedoctor.runner.streams import Streams

LONGEST_WAIT = 0.5


def run_process(
    command: Sequence[str],
    directory: Path,
    *,
    live: bool,
    time_limit: float,
    meanwhile: Callable[[], None] = lambda: None,
    ranks: Sequence[Path] = (),
    stdin_is_read: bool = False,
) -> WorkerExit:
    """Runs a command in a process group of its own until it ends or its time limit is over.

    Signals that this process is sent go to the command. If this process is killed, the command is.

    Args:
        command: the program and its arguments.
        directory: where what it writes is kept.
        live: see :func:`run_script`.
        time_limit: seconds.
        meanwhile: called now and then while it runs.
        stdin_is_read: standard input has been read to its end, and is not begun again.
        ranks: directories of the processes that it starts itself, whose output is shown and kept as well.
    """
    began = time.monotonic()
    with Streams(directory, live=live, ranks=ranks) as streams, PassedOn(streams.resize) as signals:
        with streams.ends() as (out, err), _standard_input(live, again=not stdin_is_read) as given:
            process = subprocess.Popen(command, stdin=given, stdout=out, stderr=err, process_group=0)
        with Guardian(process), Foreground(process) if live else nullcontext() as foreground:
            signals.to(process)
            timed_out = not _wait(
                process, streams, began + time_limit, lambda: signals.stop_together(foreground), meanwhile
            )
        streams.show_rest()
    return WorkerExit(
        code=process.wait(),
        timed_out=timed_out,
        seconds=time.monotonic() - began,
        asked_to_end=signals.asked_to_end,
    )


@contextlib.contextmanager
def _standard_input(live: bool, *, again: bool) -> Iterator[int | None]:
    if live:
        yield None  # the same as this process's
    elif again and stat.S_ISREG(os.fstat(0).st_mode):
        with open("/proc/self/fd/0", "rb") as anew:  # so it begins at the beginning
            yield anew.fileno()
    else:
        yield subprocess.DEVNULL


def _wait(
    process: "subprocess.Popen[bytes]", streams: Streams, deadline: float, *meanwhile: Callable[[], None]
) -> bool:
    """Waits for the process, showing what it writes; False if it had to be stopped at its time limit."""
    ended = os.pidfd_open(process.pid)
    try:
        while process.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                end(process.pid)
                process.wait()
                return False
            streams.show(min(left, LONGEST_WAIT), ended)
            for act in meanwhile:
                act()
    finally:
        os.close(ended)
    return True


_GUARDIAN = Path(__file__).with_name("ending.py")
"""A program that waits at a pipe of which the doctor has the other end."""


class Guardian:
    """A process beside the script that notices when this one is killed, even by SIGKILL. Use as a context manager.

    It is no parent, child or thread of the script, which so runs as it would alone. Where the block is left by an exception
    the script is ended as well.

    Args:
        process: the script, the first of a process group.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def __enter__(self) -> Self:
        source, self._end = os.pipe()
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARDIAN), str(self._process.pid)],
                stdin=source, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except OSError:
            self._end_script()
            raise
        finally:
            os.close(source)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._end_script()
        with contextlib.suppress(OSError):
            os.write(self._end, b".")
        os.close(self._end)
        self._guardian.wait()

    def _end_script(self) -> None:
        if self._process.poll() is None:
            end(self._process.pid)
            self._process.wait()


STDIN = 0


class Foreground:
    """Gives the terminal to a process group, so that it can read from it, and Ctrl-C and Ctrl-Z go to it alone.

    Does nothing where standard input is not this process's terminal. Use as a context manager.
    """

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.is_ours = _is_ours()
        """Whether there is a terminal to give."""

    def __enter__(self) -> Self:
        self.give()
        if self.is_ours:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGCONT)  # it may have been stopped for reading too early
        return self

    def __exit__(self, *_: object) -> None:
        self.take_back()

    def give(self) -> None:
        """The process's group has the terminal from now on."""
        self._give(self._process.pid)

    def take_back(self) -> None:
        """This process's group has it again."""
        self._give(os.getpgrp())

    def _give(self, group: int) -> None:
        if not self.is_ours:
            return
        before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else a background process is stopped for asking
        try:
            with contextlib.suppress(OSError):
                os.tcsetpgrp(STDIN, group)
        finally:
            signal.signal(signal.SIGTTOU, before)


def _is_ours() -> bool:
    """Whether standard input is the terminal that this process is in the foreground of."""
    try:
        return os.isatty(STDIN) and os.tcgetpgrp(STDIN) == os.getpgrp()
    except OSError:
        return False


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


@contextlib.contextmanager
def ending_by_interrupt() -> Iterator[None]:
    """Inside, every signal that asks this process to end raises :class:`KeyboardInterrupt`, as Ctrl-C does."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = dict(_replaced(list(_ASK_TO_END), interrupt))
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
