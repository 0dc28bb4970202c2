"""Starts workers, each a process of its own, and collects what they left.

Workers are forked from a warm server (the standard library's forkserver with torch and the trainers imported), so that
a run starts in milliseconds instead of seconds. The server never touches CUDA.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Self

from dtypedoctor.errors import UsageError
from dtypedoctor.redaction.messages import elided
from dtypedoctor.redaction.process import masked
from dtypedoctor.redaction.redact import forget_request, write_request_file
from dtypedoctor.runner.child import PRELOAD, STDERR, begin, begin_warm
from dtypedoctor.runner.directories import make_directory
from dtypedoctor.scenario.request import Request
from dtypedoctor.trace.events import Refused
from dtypedoctor.trace.reader import Trace, read_trace, steps_by_call
from dtypedoctor.trace.writer import EVENTS
from dtypedoctor.unpatched import to_json

EXIT = "exit.json"
_SAFE_PATH = "PYTHONSAFEPATH"
_LONGEST_LINE = 5000
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """How a worker process ended.

    Attributes:
        code: exit status, or minus the signal that ended it.
        timed_out: whether the doctor stopped it at its time limit.
        seconds: wall-clock time from start to end.
        unknown: whether nobody was there to see it.
        asked_to_end: the signal that asked it to end and came by way of the doctor; 0 where none did. It may have heeded it in
            its own time and with any status.
    """

    code: int
    timed_out: bool
    seconds: float
    unknown: bool = False
    asked_to_end: int = 0

    def describe(self) -> str:
        """How it ended, in words."""
        if self.unknown:
            return "ended in a way that nobody has recorded"
        if self.timed_out:
            return f"was stopped at its time limit after {self.seconds:.0f} s"
        if self.code >= 0:
            return f"ended with status {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        likely = " (often: out of memory)" if -self.code == signal.SIGKILL else ""
        return f"was killed by {name}{likely}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run: its trace, how the worker ended, and where everything lies.

    Attributes:
        foreign: whether it ran a user's script, which may leave with any status, or without a word by ``os._exit``.
        rank: which process of several it is; None where there is one only.
        ranks: all of them, this one included, in order.
        children: by number the processes that a script has spawned.
        spawned: which of those it is; None where it is the script's own.
        others: the other processes of the same script, where one of them stands for all.
    """

    trace: Trace
    exit: WorkerExit
    directory: Path
    foreign: bool = False
    rank: int | None = None
    ranks: "tuple[Run, ...]" = ()
    children: "Mapping[int, Run]" = field(default_factory=dict)
    spawned: int | None = None
    others: "tuple[Run, ...]" = ()

    @property
    def processes(self) -> "tuple[Run, ...]":
        """All processes of the same program, this one included."""
        return self.ranks or (self, *self.others)

    @property
    def died(self) -> bool:
        """Whether the worker ended without finishing its trace, and not because a script wanted it so."""
        wanted = self.foreign and self.exit.code >= 0 and not self.exit.unknown
        return self.exit.timed_out or (self.trace.end is None and not wanted)

    def last_words(self) -> str:
        """How the worker ended; for a Python process that failed also the last line of its standard error."""
        if self.exit.code <= 0 or self.exit.timed_out:
            return self.exit.describe()
        try:
            lines = (self.directory / STDERR).read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            lines = []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return self.exit.describe() + (f": {masked(elided(last[:_LONGEST_LINE]))[:200]}" if last else "")


Progress = Callable[[Path], None]
"""Called now and then with the directory of the run that is going on."""


class Launcher:
    """Runs requests in worker processes. Use as a context manager.

    Args:
        progress: called every few hundredths of a second while a worker runs.
        log: file for what the warm server prints while it imports.
    """

    def __init__(self, log: Path, progress: Progress | None = None) -> None:
        self._log = log
        self._progress = progress
        self._context = multiprocessing.get_context("forkserver")

    def __enter__(self) -> Self:
        self._context.set_forkserver_preload([PRELOAD, __name__])
        try:
            with _streams_to(self._log), _safe_path():
                resource_tracker.ensure_running()
                forkserver.ensure_running()
        except OSError as error:
            raise UsageError(f"{self._log}: cannot be written ({error.strerror})", "Give another --out.") from error
        return self

    def __exit__(self, *_: object) -> None:
        return None  # the server ends with this process, or serves the next launcher

    def run(self, request: Request, directory: Path) -> Run:
        """Runs ``request`` in a new process; everything it leaves lies in ``directory``, which must not exist yet.

        Raises:
            UsageError: the directory cannot be written, or the worker says that the scenario cannot be run at all.
        """
        started = self.start(request, directory)
        try:
            while not started.wait(POLL_SECONDS):
                if self._progress is not None:
                    self._progress(directory)
        finally:
            started.stop()
        return started.collect()

    def start(self, request: Request, directory: Path, environment: Mapping[str, str] | None = None) -> "StartedWorker":
        """Starts a worker and comes back at once; the caller stops and collects it.

        Args:
            request: what it is to do.
            directory: where everything that it leaves will lie; must not exist yet.
            environment: variables that only this worker gets.

        Raises:
            UsageError: the directory cannot be written.
        """
        make_directory(directory)
        write_request(directory, request)
        process = self._context.Process(target=begin, args=(str(directory), dict(environment or {})), daemon=False)
        with _safe_path():
            process.start()
        return StartedWorker(process, directory, request.scenario.time_limit)

    def start_warm(self, request: Request, directory: Path) -> "tuple[ForkServerProcess, Connection]":
        """Starts a server that builds the models of ``request`` in advance and forks workers; see ``worker/warm.py``.

        Raises:
            UsageError: the directory cannot be written.
        """
        make_directory(directory)
        write_request(directory, request)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=begin_warm, args=(str(directory), theirs), daemon=False)
        with _safe_path():
            process.start()
        theirs.close()
        return process, ours


class StartedWorker:
    """A worker that may still be running."""

    def __init__(self, process: ForkServerProcess, directory: Path, time_limit: float) -> None:
        self.directory = directory
        self._process = process
        self._began = time.monotonic()
        self._deadline = self._began + time_limit
        self._timed_out = False

    def wait(self, seconds: float) -> bool:
        """Waits at most so long; whether it has ended, which it also has when its time limit is over."""
        self._process.join(max(0.0, min(seconds, self._deadline - time.monotonic())))
        if self._process.is_alive() and time.monotonic() > self._deadline:
            self._timed_out = True
            self.stop()
        return not self._process.is_alive()

    def stop(self) -> None:
        """Ends it and everything that it started."""
        _stop(self._process)

    def collect(self) -> Run:
        """What it has left.

        Raises:
            UsageError: the worker says that the scenario cannot be run at all.
        """
        seconds = time.monotonic() - self._began
        ended = WorkerExit(code=self._process.exitcode or 0, timed_out=self._timed_out, seconds=seconds)
        return collect(self.directory, ended)


def write_request(directory: Path, request: Request) -> None:
    """Writes down what the worker of ``directory`` is to do.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        write_request_file(directory, request.model_dump_json())
    except OSError as error:
        raise UsageError(f"{directory}: cannot be written ({error.strerror})", "Give another --out.") from error


def collect(directory: Path, ended: WorkerExit, *, foreign: bool = False) -> Run:
    """The run that a worker has left in ``directory``; how it ended is written down beside it.

    Raises:
        UsageError: the worker says that what it was asked for cannot be run at all.
    """
    forget_request(directory)
    with contextlib.suppress(OSError):  # a full disk, or the directory is gone: what is known is told all the same
        (directory / EXIT).write_text(to_json(asdict(ended)), encoding="utf-8")
    trace = _trace(directory)
    run = Run(trace=steps_by_call(trace) if foreign else trace, exit=ended, directory=directory, foreign=foreign)
    refused = run.trace.last(Refused)
    if refused is not None:
        raise UsageError(refused.message, refused.hint)
    return run


def _trace(directory: Path) -> Trace:
    if not (directory / EVENTS).exists():
        return _nothing(f"there is none in {directory}")
    try:
        return read_trace(directory)
    except (
        UsageError,
        OSError,
    ) as error:  # something has gone over it: that must not cost what else is known of the run
        return _nothing(f"it cannot be read: {error}")


def _nothing(why: str) -> Trace:
    return Trace(records=(), samples=(), sites={}, damage=(why,))


def _stop(process: ForkServerProcess) -> None:
    """Ends the worker and everything that it started."""
    if process.pid is None:
        return
    if process.is_alive():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Lets interpreters that are started inside import nothing from the working directory: multiprocessing starts them by ``-c``."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


@contextlib.contextmanager
def _streams_to(path: Path) -> Iterator[None]:
    """Lets a process that is started inside inherit ``path`` as its standard output and error."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        for descriptor, original in enumerate(kept, start=1):
            os.dup2(original, descriptor)
            os.close(original)
