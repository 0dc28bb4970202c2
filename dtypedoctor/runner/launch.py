"""Starts workers, each a process of its own, and collects what they left.

Workers are forked from a server (the standard library's forkserver with torch and the trainers imported), so that
a run starts in milliseconds instead of seconds. The server never touches CUDA. A :class:`WarmServer` is one more between
them, which has also built the models.

What a worker does first (:func:`begin`) stands here too: both sides import this module, and it imports no torch.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from multiprocessing import forkserver, parent_process, resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import append_file
from dtypedoctor.interruptions import noticing
from dtypedoctor.runner.directories import make_directory
from dtypedoctor.runner.process import Guardian
from dtypedoctor.runner.run import STDERR, STDOUT, Run, WorkerExit, collect, write_request
from dtypedoctor.scenario.model import Request, Scenario, ScenarioStep

_SAFE_PATH = "PYTHONSAFEPATH"
POLL_SECONDS = 0.05

WORKER = "dtypedoctor.worker.main"
"""The module on the other side of the border; it is imported by name, and only in worker processes."""

WARM = "dtypedoctor.worker.warm"
"""The same for a server that builds models and forks workers."""

PRELOAD = "dtypedoctor.worker.preload"
"""What the warm server imports before it forks workers."""

IN_PLACE = "DTYPEDOCTOR_RESIDENT_IN_PLACE"
"""Variable that has a server make its runs itself on a CPU, too; see ``worker/warm.py``."""

NO_ANSWER = 1
"""Exit status of a worker whose server has died with it."""

Progress = Callable[[Path], None]
"""Called now and then with the directory of the run that is going on."""


class StartedWorker:
    """A worker that may still be running.

    Args:
        directory: where it leaves what it leaves.
        time_limit: seconds after which it is stopped.
        status: its exit status, for which it waits at most so many seconds; None while it runs.
        kill: ends it and everything that it started.
    """

    def __init__(
        self, directory: Path, time_limit: float, status: Callable[[float], int | None], kill: Callable[[], None]
    ) -> None:
        self.directory = directory
        self._ask_status = status
        self._kill = kill
        self._began = time.monotonic()
        self._deadline = self._began + time_limit
        self._timed_out = False
        self._status: int | None = None
        self._seconds = 0.0

    def wait(self, seconds: float) -> bool:
        """Waits at most so long; whether it has ended, which it also has when its time limit is over."""
        if self._status is None:
            self._look(min(seconds, self._deadline - time.monotonic()))
        if self._status is None and time.monotonic() > self._deadline:
            self._timed_out = True
            self.stop()
        return self._status is not None

    def stop(self) -> None:
        """Ends it and everything that it started."""
        if self._status is None:
            self._kill()
            while self._status is None:
                self._look(1.0)

    def collect(self) -> Run:
        """What it has left.

        Raises:
            UsageError: the worker says that the scenario cannot be run at all.
        """
        return collect(self.directory, self.ended())

    def ended(self) -> WorkerExit:
        """How it has ended."""
        return WorkerExit(code=self._status or 0, timed_out=self._timed_out, seconds=self._seconds)

    def _look(self, seconds: float) -> None:
        self._status = self._ask_status(max(0.0, seconds))
        self._seconds = time.monotonic() - self._began


def _end_importing(_: KeyboardInterrupt) -> None:
    """Ends the server in the middle of its imports, which may take long: it sees only after them that this process has ended."""
    server: Any = forkserver._forkserver
    pid = _server_process()
    if Launcher.has_imported or pid is None:
        return
    with contextlib.suppress(AttributeError, OSError):  # it has ended, or Python calls these otherwise
        os.kill(pid, signal.SIGKILL)
        server._stop()


def _server_process() -> int | None:
    return getattr(forkserver._forkserver, "_forkserver_pid", None)


def _leave() -> None:
    """What a process does that is only started to see that processes can be started."""


def run_to_end(started: StartedWorker, progress: Progress = lambda _: None) -> Run:
    """Waits for a worker, and stops it if this is interrupted.

    Raises:
        UsageError: the worker says that the scenario cannot be run at all.
    """
    try:
        while not started.wait(POLL_SECONDS):
            progress(started.directory)
    finally:
        started.stop()
    return started.collect()


class Launcher:
    """Runs requests in worker processes. Use as a context manager.

    Args:
        log: file for what the warm server prints while it imports.
        preload: modules that it imports.
    """

    has_imported: ClassVar[bool] = False
    """Whether the server of this process, which all launchers share, has forked a process already."""

    def __init__(self, log: Path, preload: Sequence[str] = (PRELOAD,)) -> None:
        self._preload = preload
        self._log = log
        self._context = multiprocessing.get_context("forkserver")
        self._guardian = Guardian()

    def __enter__(self) -> Self:
        self._context.set_forkserver_preload([*self._preload, __name__])
        try:
            with noticing(_end_importing, KeyboardInterrupt), _streams_to(self._log), _safe_path():
                resource_tracker.ensure_running()
                forkserver.ensure_running()
                # This process may be killed: then nobody else ends a server that imports, and removes its socket.
                self._guardian.__enter__()
                if (server := _server_process()) is not None:
                    self._guardian.end_server(server, util.get_temp_dir())
        except OSError as error:
            if str(error.filename) == str(self._log):
                raise UsageError(f"{self._log}: cannot be written ({error.strerror})", "Give another --out.") from error
            too_long = error.errno is None  # Python's own: "AF_UNIX path too long"
            hint = "Set TMPDIR to a folder with a shorter path." if too_long else ""
            raise UsageError(f"no worker can be started: {error.strerror or error}", hint) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """The server ends with this process, or serves the next launcher; one that imports ends if this is interrupted."""
        self._guardian.__exit__()
        if isinstance(error, KeyboardInterrupt):
            _end_importing(error)

    @property
    def is_importing(self) -> bool:
        """Whether the server may still be importing what workers need: it imports when it is started, and serves later launchers, too."""
        return not Launcher.has_imported

    def wait_for_imports(self) -> None:
        """Waits until the server can fork workers."""
        process = self._context.Process(target=_leave)
        with _safe_path():
            process.start()
        process.join()
        Launcher.has_imported = True

    def run(self, request: Request, directory: Path) -> Run:
        """Runs ``request`` in a new process; everything it leaves lies in ``directory``, which must not exist yet.

        Raises:
            UsageError: the directory cannot be written, or the worker says that the scenario cannot be run at all.
        """
        return run_to_end(self.start(request, directory))

    def start(self, request: Request, directory: Path, environment: Mapping[str, str] | None = None) -> StartedWorker:
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
        return StartedWorker(directory, request.scenario.time_limit, partial(_status, process), partial(_kill, process))

    def start_warm(
        self, request: Request, directory: Path, *, in_place: bool
    ) -> "tuple[ForkServerProcess, Connection]":
        """Starts a server that builds the models of ``request`` in advance and forks workers; see ``worker/warm.py``.

        Raises:
            UsageError: the directory cannot be written.
        """
        make_directory(directory)
        write_request(directory, request)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=begin_warm, args=(str(directory), theirs, in_place), daemon=False)
        with _safe_path():
            process.start()
        theirs.close()
        return process, ours


def _status(process: ForkServerProcess, seconds: float) -> int | None:
    """The exit status of a process, for which it waits at most so long; None while it runs."""
    process.join(seconds)
    return process.exitcode


def _kill(process: ForkServerProcess) -> None:
    """Ends a process, the first of its group, and everything that it started."""
    assert process.pid is not None  # it has been started
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


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
    with append_file(path) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        for descriptor, original in enumerate(kept, start=1):
            os.dup2(original, descriptor)
            os.close(original)


PLAIN = ("forward", "generate")
"""Workloads after which a model can be made what it was; trainers change more of a process than anybody knows."""
KEEP_FLOAT32 = "keep-float32"
"""The correction that is undone in the model alone; others change classes and functions."""


def may_share_process(scenario: Scenario) -> bool:
    """Whether runs of ``scenario`` may follow each other in one process: nothing in it changes more than the model."""
    if scenario.distributed is not None or scenario.conditions:
        return False
    if any(one.id != KEEP_FLOAT32 for one in scenario.corrections):
        return False
    return all(map(_changes_only_the_model, scenario.steps))


def _changes_only_the_model(step: ScenarioStep) -> bool:
    if step.model is None or step.compile is not None or step.side_stream:
        return False
    foreign = ":" in step.model.name  # code of others, and builtin models that carry the faults of their libraries
    adapted = step.model.lora is not None or step.model.quantization is not None
    return step.workload.kind in PLAIN and not foreign and not adapted


class WarmServer:
    """Starts workers in milliseconds, because the models are built already. Use as a context manager.

    On a CPU each run is a fork of the server. On a GPU, whose state does not survive a fork, the server makes one run after the other in
    place. What must not follow other runs in a process gets one of its own from the launcher, and so does a run with conditions, which
    have to be there before the model is built, and everything where building the models raised. A server that has died or has retired is
    replaced at the next run.

    Args:
        launcher: started already.
        request: its scenario names the models to build.
        directory: for what the server prints; must not exist yet.
        resident: False builds nothing in advance and starts each run in a new process; True makes runs in place on a GPU, too. None does
            what is certified: forks on a CPU, new processes on a GPU.
        say: is called with what the user should know of the server.
    """

    def __init__(
        self,
        launcher: Launcher,
        request: Request,
        directory: Path,
        *,
        resident: bool | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._launcher = launcher
        self._request = request
        self._directory = directory
        self._resident = resident
        self._say = say
        self._process: ForkServerProcess | None = None
        self._channel: Connection | None = None
        self._starts = 0
        self._ended: dict[str, int] = {}
        self._in_place = ""
        """Directory of the run that the server itself is making; empty where there is none."""
        self.is_warm = False
        """Whether the models are built."""
        self.device = "cpu"
        """Type of the device that the scenario runs on, if models were built."""
        self.room = 0
        """Bytes of a GPU that are free beside the models, where runs are made in place."""

    def __enter__(self) -> Self:
        if self._resident is not False:
            self._begin()
        return self

    def _begin(self) -> bool:
        """Starts the server, and waits until its models are built; whether they are."""
        self._starts += 1
        place = self._directory.with_name(self._directory.name + (f"-{self._starts}" if self._starts > 1 else ""))
        self._process, self._channel = self._launcher.start_warm(self._request, place, in_place=bool(self._resident))
        with noticing(lambda _: self.__exit__(None, None, None)):  # Ctrl-C, say: nobody else ends the server then
            try:
                _, self.is_warm, self.device, self.room = self._channel.recv()
            except EOFError:  # the server has died while building: a worker will tell of what
                self.is_warm = False
        return self.is_warm

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.join(1.0)
            if self._process.exitcode is None:
                _kill(self._process)
            self._process.join()
        self._process = None

    @property
    def runs_in_place(self) -> bool:
        """Whether the server makes runs itself, one after the other."""
        if not self.is_warm:
            return False
        return self.device != "cpu" or os.environ.get(IN_PLACE) == "1"  # on a GPU it is warm in no other way

    def start(self, request: Request, directory: Path, environment: Mapping[str, str] | None = None) -> StartedWorker:
        """Starts a worker and comes back at once; the caller stops and collects it.

        Args:
            request: what it is to do.
            directory: where everything that it leaves will lie; must not exist yet.
            environment: variables for it alone; a worker that is forked from a warm server has that one's.

        Raises:
            UsageError: the directory cannot be written.
        """
        if not self.is_warm or request.scenario.conditions:  # eager attention is chosen when a model is built
            return self._launcher.start(request, directory, environment)
        if not self.runs_in_place:
            make_directory(directory)
            write_request(directory, request)
            self._send("run", directory)
            status, kill = partial(self.status_of, directory), partial(self.kill, directory)
            return StartedWorker(directory, request.scenario.time_limit, status, kill)
        if self._in_place or not may_share_process(request.scenario):
            return self._launcher.start(request, directory, environment)
        if self._process is None and not self._begin():
            return self._launcher.start(request, directory, environment)
        make_directory(directory)
        write_request(directory, request)
        self._in_place = str(directory)
        self._send("run", directory)
        status = partial(self._status_in_place, directory)
        return StartedWorker(directory, request.scenario.time_limit, status, self._kill_in_place)

    def _status_in_place(self, directory: Path, seconds: float) -> int | None:
        """The exit status of the run that the server makes; where it has ended with it, the server's own."""
        process, channel = self._process, self._channel
        assert process is not None
        assert channel is not None
        if not wait([channel, process.sentinel], max(0.0, seconds)):
            return None
        try:
            what, where, status = channel.recv() if channel.poll() else ("died", "", NO_ANSWER)
        except (EOFError, ConnectionError):
            what, where, status = "died", "", NO_ANSWER
        if what == "ended":
            self._in_place = ""
            return int(status)
        process.join()
        self.__exit__(None, None, None)
        has_begun, is_wanted = (directory / STDOUT).exists(), self._in_place != ""
        if has_begun or not is_wanted:
            self._in_place = ""
            return process.exitcode or NO_ANSWER
        self._say(f"the models are loaded again in a new process: {where or 'theirs has died'}")
        if not self._begin():
            self._in_place = ""
            return NO_ANSWER
        self._send("run", directory)
        return None

    def _kill_in_place(self) -> None:
        """Ends the run that the server makes or is about to make, and the server with it; the next run finds another one."""
        self._in_place = ""
        if self._process is not None:
            _kill(self._process)

    def kill(self, directory: Path) -> None:
        """Ends the worker of ``directory`` and everything that it has started."""
        self._send("stop", directory)

    def status_of(self, directory: Path, seconds: float) -> int | None:
        """The exit status of the worker of ``directory``, for which it waits at most so long; None while it runs."""
        assert self._channel is not None  # it has been started
        deadline = time.monotonic() + seconds
        while str(directory) not in self._ended:
            if not wait([self._channel], max(0.0, deadline - time.monotonic())):
                return None
            try:
                _, where, status = self._channel.recv()
            except (EOFError, ConnectionError):
                where, status = str(directory), NO_ANSWER
            self._ended[where] = status
        return self._ended[str(directory)]

    def _send(self, verb: str, directory: Path) -> None:
        assert self._channel is not None  # it has been started
        try:
            self._channel.send((verb, str(directory)))
        except (BrokenPipeError, ConnectionError):
            self._ended[str(directory)] = NO_ANSWER


def begin(directory: str, environment: Mapping[str, str] | None = None) -> None:
    """Cuts the process loose from the doctor's streams and session, then serves the request in ``directory``.

    Args:
        directory: holds the request.
        environment: variables to set before anything is imported.
    """
    place = _set_apart(directory)
    os.environ.update(environment or {})
    _leave_with_the_doctor()
    _serve(place)


def _serve(place: Path) -> None:
    worker = import_module(WORKER)
    worker.leave(worker.serve(place))


def begin_warm(directory: str, channel: Connection, in_place: bool) -> None:
    """The same for a server of workers, which ends when the doctor closes ``channel``."""
    place = _set_apart(directory)
    import_module(WARM).serve_warm(place, channel, redirect, _leave_with_the_doctor, in_place=in_place)
    os._exit(0)


def _set_apart(directory: str) -> Path:
    os.setsid()  # so that the doctor can stop the process together with everything that it starts
    place = Path(directory)
    redirect(place)
    return place


def redirect(directory: Path) -> None:
    """Lets what this process writes to its standard streams go into files of a run's directory."""
    _redirect(directory / STDOUT, 1)
    _redirect(directory / STDERR, 2)


def _redirect(path: Path, descriptor: int) -> None:
    """Lets what is written to ``descriptor`` go to the end of ``path``, which is the user's alone: it is raw."""
    with append_file(path, mode=0o600) as file:
        os.dup2(file.fileno(), descriptor)


def _leave_with_the_doctor() -> None:
    """A worker whose doctor was killed must not go on for hours."""
    parent = parent_process()
    if parent is None:
        return

    def die_with_parent() -> None:
        parent.join()
        os.killpg(os.getpgrp(), signal.SIGKILL)  # and with it what it has started itself

    threading.Thread(target=die_with_parent, daemon=True, name="dtypedoctor-parent").start()
