"""Runs a user's command as it is: it has this process's terminal, streams, process group and signals, and records itself.

This process only waits for its end, because nobody else can say how it ended, and so that the shell waits for the report. What a terminal sends
goes to both, as they are of one process group; what is sent to this process alone is sent on. The command ends with this process.
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

from dtypedoctor.foreign_files import parse_json, read_file, working_directory, write_file
from dtypedoctor.guardian import PROGRAM, end
from dtypedoctor.interruptions import interrupt
from dtypedoctor.redaction.redact import REQUEST, public_text
from dtypedoctor.runner.command import hooked
from dtypedoctor.runner.directories import make_directory
from dtypedoctor.runner.run import (
    STDERR,
    STDOUT,
    Run,
    WorkerExit,
    collect,
    deleted,
    led_by,
    nothing_recorded,
)
from dtypedoctor.trace.lines import EVENTS
from dtypedoctor.trace.ranks import (
    FAILURES,
    JOB,
    REPEATS,
    STATES,
    child_directories,
    place_in_job,
    rank_directories,
    rank_directory,
)

LOOK_SECONDS = 0.5
SECONDS_TO_END = 10.0
"""How long a script that nobody sees has to end when the command is asked to."""


def run_process(
    command: Sequence[str],
    directory: Path,
    *,
    live: bool,
    time_limit: float,
    environment: Mapping[str, str],
    meanwhile: Callable[[], None] = lambda: None,
    guardian: "Guardian | None" = None,
) -> WorkerExit:
    """Runs a command until it ends or its time limit is over.

    Args:
        command: the program and its arguments.
        directory: where what it writes is kept if it is not shown.
        live: see :func:`run_script`.
        time_limit: seconds.
        environment: its variables.
        meanwhile: called as soon as it runs, then now and then.
        guardian: what ends the command if this process is killed; None for one of its own.
    """
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        guardian = guardian or stack.enter_context(Guardian())
        streams = {} if live else stack.enter_context(_kept_streams(directory))
        process = subprocess.Popen(command, env=environment, **streams)
        with guardian.ending(process):
            asked_to_end, timed_out = _wait(process, began + time_limit, meanwhile, patient=live)
    return WorkerExit(
        code=process.returncode,
        timed_out=timed_out,
        seconds=time.monotonic() - began,
        asked_to_end=asked_to_end,
        left=_left_running(environment[JOB]) if JOB in environment else "",
    )


@contextlib.contextmanager
def _kept_streams(directory: Path) -> Iterator[dict[str, Any]]:
    """Streams of a run that is not shown. It reads standard input again if that is a file, which only the user may read; else it reads nothing."""
    with contextlib.ExitStack() as files:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL}
        if stat.S_ISREG(os.fstat(0).st_mode):
            streams["stdin"] = files.enter_context(open("/proc/self/fd/0", "rb"))
        for stream, name in (("stdout", STDOUT), ("stderr", STDERR)):
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            files.callback(os.close, descriptor)
            streams[stream] = descriptor
        yield streams


_OF_ONE_PROCESS = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS,
    signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP,
}  # fmt: skip
"""Those that nobody can catch, by which the kernel tells a process of what it did itself, or that stop a whole job."""
_AWAITED = signal.valid_signals() - _OF_ONE_PROCESS
_ASK_TO_END = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT}
_BY_TERMINAL = 128
"""``si_code`` of a signal that the kernel has sent: a terminal sends it to all processes of the job."""


SECONDS_OF_GROUP = 0.1
"""How long a signal that is sent to a group takes to reach all of its processes, at most."""


class _Echo:
    """A process of this one's group that does nothing but tell what signals it gets. Use as a context manager.

    A signal that reaches it, too, was sent to the group (``kill -INT -PGID``, ``timeout``) or to each process of a job: the script has it already.
    """

    def __enter__(self) -> Self:
        self._heard, telling = os.pipe()
        ends, self._lives = os.pipe()  # closed with this process, however it ends
        self._told = b""
        self._process = os.fork()
        if self._process == 0:
            try:
                os.close(self._lives)
                _tell_signals(telling, ends)
            finally:
                os._exit(0)
        os.close(telling)
        os.close(ends)
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._heard)
        os.close(self._lives)

    def also_got(self, number: int) -> bool:
        """Whether a signal that this process has received reaches the other one."""
        until = time.monotonic() + SECONDS_OF_GROUP
        while number not in self._told and (left := until - time.monotonic()) > 0:
            if select.select([self._heard], [], [], left)[0]:
                told = os.read(self._heard, 64)
                self._told += told
                if not told:  # somebody has ended it
                    break
        got = number in self._told
        self._told = self._told.replace(bytes([number]), b"")
        return got


def _tell_signals(telling: int, ends: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    for stream in range(3):  # whoever reads the script's output waits for all who hold it
        os.close(stream)
    fcntl.fcntl(ends, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(ends, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)  # SIGIO when the other end is closed
    while True:
        with contextlib.suppress(BlockingIOError):
            if os.read(ends, 1) == b"":
                return
        received = signal.sigwaitinfo(_AWAITED)
        if received.si_code <= 0:  # by a process; Ctrl-C comes from the kernel
            os.write(telling, bytes([received.si_signo]))


def _wait(
    process: "subprocess.Popen[bytes]", deadline: float, meanwhile: Callable[[], None], *, patient: bool
) -> tuple[int, bool]:
    """Waits for a process, and sends on what this one is sent.

    Returns:
        The first signal that asked it to end, 0 where none did, and whether it had to be stopped at its deadline.
    """
    asked_to_end, timed_out = 0, False
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    try:
        with _Echo() as echo:
            meanwhile()
            while process.poll() is None:
                left = deadline - time.monotonic()
                if left <= 0 and not timed_out:
                    timed_out = True
                    end(process.pid)
                received = signal.sigtimedwait(_AWAITED, min(max(left, 0.01), LOOK_SECONDS))
                if received is None:
                    meanwhile()
                    continue
                if received.si_signo in _ASK_TO_END:
                    asked_to_end = asked_to_end or received.si_signo
                    deadline = deadline if patient else min(deadline, time.monotonic() + SECONDS_TO_END)
                # whether the terminal has sent a signal to all processes of the job, or somebody to the whole group
                if received.si_signo != signal.SIGCHLD and not (
                    received.si_code == _BY_TERMINAL or echo.also_got(received.si_signo)
                ):
                    process.send_signal(received.si_signo)
        while (received := signal.sigtimedwait(_AWAITED, 0)) is not None:  # which came together with its end
            asked_to_end = asked_to_end or received.si_signo * (received.si_signo in _ASK_TO_END)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return asked_to_end, timed_out


def _left_running(job: str) -> str:
    """Processes that were started by a command, have loaded torch and are still there though it has ended, in words."""
    mark, running = f"{JOB}={job}".encode(), []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        process = Path("/proc", name)
        with contextlib.suppress(OSError):  # it is somebody else's, or has ended
            is_its = mark in (process / "environ").read_bytes().split(b"\0")
            if is_its and b"libtorch" in (process / "maps").read_bytes():
                running.append(f"process {name} ({(process / 'comm').read_text().strip()})")
    return ", ".join(running)


class Guardian:
    """A process beside this one that notices when this one is killed, even by SIGKILL. Use as a context manager.

    It is no parent, child or thread of the script, which so runs as it would alone. It then ends the script, and moves the record.

    Args:
        private: a folder that it moves.
        wanted: where to.
        merge: see :func:`dtypedoctor.guardian.make_run_directory`.
    """

    def __init__(self, private: Path | None = None, wanted: Path | None = None, *, merge: bool = False) -> None:
        here = working_directory() or Path()
        self._move = [str(private), str(wanted and here / wanted), merge] if private is not None else None

    def __enter__(self) -> Self:
        source, self._pipe = os.pipe()
        try:
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", PROGRAM],
                stdin=source, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(source)
        self._tell([])
        return self

    def __exit__(self, *_: object) -> None:
        self._move = None
        self._tell([])
        os.close(self._pipe)
        self._guardian.wait()

    @contextlib.contextmanager
    def ending(self, process: "subprocess.Popen[bytes]") -> Iterator[None]:
        """Inside, a script, the first of a process group, ends with this process; it is also ended where the block is left by an exception."""
        self._tell([process.pid])
        with contextlib.ExitStack() as interrupted:
            interrupted.callback(_end_script, process)
            yield
            interrupted.pop_all()
        self._tell([])

    def end_server(self, server: int, sockets: str) -> None:
        """Has a fork server and its workers end with this process, and the folder of its sockets removed.

        By itself a server sees only after its imports, which take seconds, that this process was killed.
        """
        self._tell([server], sockets)

    def _tell(self, processes: list[int], folder: str | None = None) -> None:
        wanted = {"end": processes, "remove": folder, "move": self._move}
        with contextlib.suppress(BrokenPipeError):  # somebody has ended the guardian
            os.write(self._pipe, f"{json.dumps(wanted)}\n".encode())


def _end_script(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        end(process.pid)
        process.wait()


@contextlib.contextmanager
def outliving() -> Iterator[None]:
    """Inside, signals that are none of this process's business do not end it while no script is running."""
    before = dict(
        _replaced(sorted(_AWAITED - _ASK_TO_END - {signal.SIGCHLD, signal.SIGCONT, signal.SIGWINCH}), lambda *_: None)
    )
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def ending_by_interrupt() -> Iterator[None]:
    """Inside, every signal that asks this process to end raises :class:`KeyboardInterrupt`, as Ctrl-C does."""
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


def run_script(
    command: Sequence[str],
    request: Mapping[str, Any],
    directory: Path,
    *,
    live: bool,
    time_limit: float,
    through: Sequence[str] = (),
    meanwhile: Callable[[], None] = lambda: None,
    guardian: Guardian | None = None,
) -> Run:
    """Runs a user's program; everything it leaves lies in ``directory``, which must not exist yet.

    Args:
        command: starts it.
        request: what its processes are asked for, as the file in the folder of the run has it.
        directory: for its trace.
        live: it has this process's streams. Otherwise what it writes is only kept, and it reads standard input again from the beginning if that is a
            file; else it reads nothing.
        time_limit: seconds.
        through: program and arguments that stand before the command, and become it (:mod:`dtypedoctor.runner.view`).
        meanwhile: see :func:`run_process`.
        guardian: see :func:`run_process`.

    Returns:
        The run of its only process, or of the rank that failed first, or of rank 0.

    Raises:
        UsageError: the directory cannot be written, or the script continues what its first run has written.
    """
    prepare(request, directory)
    ended = run_process(
        [*through, *command],
        directory,
        live=live,
        time_limit=time_limit,
        environment=hooked({JOB: str(directory.resolve())}),
        meanwhile=meanwhile,
        guardian=guardian,
    )
    if not directory.is_dir():
        return deleted(directory, ended)
    return collect_job(directory, ended)


def prepare(request: Mapping[str, Any], directory: Path) -> None:
    """Makes the folder of a script's run, in which its processes find what is asked of them.

    A later run begins with the random states of the first one, and does not read what that has written.

    Raises:
        UsageError: it exists, or cannot be created.
    """
    make_directory(directory)
    write_file(directory / REQUEST, public_text(json.dumps({**request, "member": place_in_job()})))
    if request.get("repeatable"):
        (directory / STATES).write_text("{}", encoding="ascii")
    if request.get("repeats") is not None:
        first = directory.parent / request["repeats"]
        (directory / REPEATS).write_text(str(first.resolve()), encoding="utf-8")
        for states in first.glob(STATES.replace(".", "*.")):
            shutil.copy(states, directory)


def collect_job(directory: Path, ended: WorkerExit) -> Run:
    """The run of the processes that have recorded themselves in ``directory``: of the rank that failed first or of the first one, with all others, or of
    its first process with those that this has started."""
    ranks = rank_directories(directory)
    failures = failures_in(directory)
    if ranks:
        started = sorted({*ranks, *failures})  # one that failed before it came to torch has no directory
        runs = [
            collect_rank(rank_directory(directory, rank), rank, exit_of_rank(rank, ended, failures)) for rank in started
        ]
        return led_by(tuple(runs), first_failure(failures, default=min(ranks)))
    if not (directory / EVENTS).exists():
        nothing_recorded(directory, ended)
    own = collect(directory, ended, foreign=True)
    spawned = enumerate(child_directories(directory).values(), 1)
    return replace(own, children={number: collect(place, ended, foreign=True) for number, place in spawned})


def first_failure(failures: dict[int, dict[str, Any]], *, default: int) -> int:
    """The rank that failed first. Times are whole seconds, and whom torchrun ended by SIGTERM may share that of the rank that failed."""

    def order(rank: int) -> tuple[bool, float]:
        failure = failures[rank]
        return int(failure["code"]) == -signal.SIGTERM, float(failure["time"])

    return min(failures, key=order, default=default)


def unless_interrupted(run: Run) -> Run:
    """A run that came to its own end.

    Raises:
        KeyboardInterrupt: a signal to this process asked it to end. That ends the command, and is no outcome of the run.
    """
    asked = run.exit.asked_to_end
    if asked:
        raise KeyboardInterrupt(f"interrupted by {signal.Signals(asked).name}")
    return run


def failures_in(directory: Path) -> dict[int, dict[str, Any]]:
    """What torchrun has written down of ranks that failed: code and time by rank."""
    try:
        found = parse_json(read_file(directory / FAILURES))
        return {int(rank): {"code": int(told["code"]), "time": float(told["time"])} for rank, told in found.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none has failed, or torchrun itself was ended
        return {}


def collect_rank(place: Path, rank: int, ended: WorkerExit) -> Run:
    """One rank's run, which lies in ``place`` and ended so.

    One that was asked to end while it was ending by itself is taken at the word of its trace.
    """
    run = collect(place, ended, foreign=True)
    end = run.trace.end
    if end is not None and run.exit.code == -signal.SIGTERM and not ended.timed_out:
        run = collect(place, replace(run.exit, code=int(end.outcome != "completed")), foreign=True)
    return replace(run, rank=rank)


def exit_of_rank(rank: int, ended: WorkerExit, failures: dict[int, dict[str, Any]]) -> WorkerExit:
    """How a rank of torchrun's ended, as far as that is known.

    When a rank fails, torchrun ends the others by SIGTERM, also those that are ending by themselves: what they would have ended with is not
    known.
    """
    if ended.timed_out:
        return ended
    code = int(failures[rank]["code"]) if rank in failures else -signal.SIGTERM if failures else ended.code
    by_launcher = signal.SIGTERM if failures and code == -signal.SIGTERM else 0
    return replace(ended, code=code, ended_by_launcher=by_launcher)
