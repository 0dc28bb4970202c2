"""Makes runs in worker processes, one after the other, and collects what they left.

Workers are forked from a server (the standard library's forkserver with torch and the trainers imported), so that
a run starts in milliseconds instead of seconds. The server never touches CUDA. A :class:`Launcher` forks one for each run;
a :class:`Resident` keeps one, which has built the models, for all runs that change nothing else.

What a worker does first (:func:`begin`) stands here too: both sides import this module, and it imports no torch.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from dtypedoctor.lab.scenarios.model import Request, Scenario, Script
from dtypedoctor.plugins import KEEP_FLOAT32
from dtypedoctor.redaction.redact import write_request_file
from dtypedoctor.replay.capsule import MODEL as CAPSULE
from dtypedoctor.runner.command import Program
from dtypedoctor.runner.directories import make_directory
from dtypedoctor.runner.process import (
    Guardian,
    run_script,
)
from dtypedoctor.runner.run import STDERR, STDOUT, Run, WorkerExit, collect

_SAFE_PATH = "PYTHONSAFEPATH"
POLL_SECONDS = 0.05

WORKER = "dtypedoctor.lab.worker.main"
"""The module on the other side of the border; it is imported by name, and only in worker processes."""

PRELOAD = "dtypedoctor.lab.worker.preload"
"""What the server imports before it forks workers."""

FAILED = 1
"""Exit status of a worker that has ended without one."""


def _to_its_end(
    directory: Path,
    time_limit: float,
    status: Callable[[float], int | None],
    kill: Callable[[], None],
) -> Run:
    """Waits for a run and collects it; what takes too long, or is not wanted any more, is killed.

    Args:
        directory: where it leaves what it leaves.
        time_limit: seconds.
        status: its exit status, for which it waits at most so many seconds; None while it runs.
        kill: ends it and everything that it started.

    Raises:
        UsageError: the worker says that the scenario cannot be run at all.
    """
    began = time.monotonic()
    timed_out = False
    code = None
    try:
        while (code := status(POLL_SECONDS)) is None:
            if not timed_out and time.monotonic() - began > time_limit:
                timed_out = True
                kill()
    finally:
        if code is None:  # Ctrl-C, say
            kill()
            while status(1.0) is None:
                pass
    return collect(directory, WorkerExit(code=code, timed_out=timed_out, seconds=time.monotonic() - began))


def _end_importing(_: KeyboardInterrupt) -> None:
    """Ends the server in the middle of its imports, which may take long: it sees only after them that this process has ended."""
    server: Any = forkserver._forkserver
    pid = _server_process()
    if Launcher.has_imported or pid is None:
        return
    with suppress(AttributeError, OSError):  # it has ended, or Python calls these otherwise
        os.kill(pid, signal.SIGKILL)
        server._stop()


def _server_process() -> int | None:
    return getattr(forkserver._forkserver, "_forkserver_pid", None)


def _leave() -> None:
    """What a process does that is only started to see that processes can be started."""


class Launcher:
    """Runs requests in worker processes. Use as a context manager.

    Args:
        log: file for what the server prints while it imports.
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
        self.start(_leave).join()
        Launcher.has_imported = True

    def run(self, request: Request, directory: Path) -> Run:
        """Runs ``request`` in a new process; everything it leaves lies in ``directory``, which must not exist yet.

        Raises:
            UsageError: the directory cannot be written, or the worker says that the scenario cannot be run at all.
        """
        make_directory(directory)
        _write_request(directory, request)
        process = self.start(begin, str(directory))
        status, kill = partial(_status, process), partial(_kill, process)
        return _to_its_end(directory, request.scenario.time_limit, status, kill)

    def start(self, function: Callable[..., None], *args: Any) -> ForkServerProcess:
        """Starts a process that calls ``function``."""
        process = self._context.Process(target=function, args=args, daemon=False)
        with _safe_path():
            process.start()
        return process

    def channel(self) -> tuple[Connection, Connection]:
        """Both ends of a channel to a process that is going to be started."""
        return self._context.Pipe()


def _status(process: ForkServerProcess, seconds: float) -> int | None:
    """The exit status of a process, for which it waits at most so long; None while it runs."""
    process.join(seconds)
    return process.exitcode


def _kill(process: ForkServerProcess) -> None:
    """Ends a process, the first of its group, and everything that it started."""
    assert process.pid is not None  # it has been started
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


@contextmanager
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


@contextmanager
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


IN_PLACE = ("forward", "generate", "train")
"""Workloads after which a model can be made what it was; trainers change more of a process than anybody knows."""


def may_share_process(scenario: Scenario) -> bool:
    """Whether runs of ``scenario`` may follow each other in one process: nothing in it changes more than its model.

    Conditions and most corrections change classes and functions, the compiler keeps what it has compiled, and packed weights have a state beside
    their tensors. A capsule is built anew for each call, which bounds the memory of its process.
    """
    first, *more = scenario.steps
    others = (scenario.distributed, scenario.conditions, more, first.compile, first.side_stream)
    if any(others) or first.workload.kind not in IN_PLACE or first.model is None:
        return False
    is_corrected = any(one.id != KEEP_FLOAT32 for one in scenario.corrections)
    return not (is_corrected or first.model.quantization or first.model.name.startswith(CAPSULE))


class Resident:
    """Keeps the model of a scenario loaded in one process, which makes one run after the other. Use as a context manager.

    The process is started for the first run that may be made in it, and again after a run that has ended it or has left the model otherwise than it
    was built. Any other run gets a process of its own.

    Args:
        launcher: started already.
        scenario: names the model that stays loaded.
        directory: for what the process prints; must not exist yet.
        say: is called with what the user should know.
    """

    def __init__(
        self, launcher: Launcher, scenario: Scenario, directory: Path, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._launcher = launcher
        self._scenario = scenario
        self._directory = directory
        self._say = say
        self._process: ForkServerProcess | None = None
        self._channel: Connection | None = None
        self._starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, request: Request, directory: Path) -> Run:
        """Runs ``request``; everything it leaves lies in ``directory``, which must not exist yet.

        Raises:
            UsageError: the directory cannot be written, or the worker says that the scenario cannot be run at all.
        """
        if not may_share_process(request.scenario):
            if self._scenario.device != "cpu":
                self._end()  # a GPU may have no room for a second model
            return self._launcher.run(request, directory)
        channel = self._ready_channel()
        make_directory(directory)
        _write_request(directory, request)
        with suppress(BrokenPipeError, ConnectionError):  # it has died: its status says so
            channel.send(str(directory))
        return _to_its_end(directory, request.scenario.time_limit, self._status, self._kill)

    def _ready_channel(self) -> Connection:
        """The channel of a process that waits for a run."""
        if self._process is not None and self._channel is not None:
            try:
                why = self._channel.recv()
            except (EOFError, ConnectionError):
                why = "their process has died"
            if not why:
                return self._channel
            self._say(f"loading the model again in a new process: {why}")
            self._end()
        self._starts += 1
        home = self._directory.with_name(self._directory.name + (f"-{self._starts}" if self._starts > 1 else ""))
        make_directory(home)
        _write_request(home, Request(scenario=self._scenario))
        self._channel, theirs = self._launcher.channel()
        self._process = self._launcher.start(begin_resident, str(home), theirs)
        theirs.close()
        return self._channel

    def _status(self, seconds: float) -> int | None:
        """The exit status of the run that is going on; where its process has ended with it, that one's. None while it runs."""
        process, channel = self._process, self._channel
        assert process is not None
        assert channel is not None
        if not wait([channel, process.sentinel], seconds):
            return None
        with suppress(EOFError, ConnectionError):
            if channel.poll():
                return int(channel.recv())
        process.join()
        self._end()
        return process.exitcode or FAILED

    def _kill(self) -> None:
        if self._process is not None:
            _kill(self._process)

    def _end(self) -> None:
        """Ends the process, if there is one: it waits for a run, or has ended."""
        process, channel, self._process, self._channel = self._process, self._channel, None, None
        if channel is not None:
            channel.close()
        if process is not None:
            process.join(1.0)
            if process.exitcode is None:
                _kill(process)
            process.join()


def begin(directory: str) -> None:
    """Cuts the process loose from the doctor's streams and session, then serves the request in ``directory``."""
    place = _set_apart(directory)
    worker = import_module(WORKER)
    worker.leave(worker.serve(place))


def begin_resident(directory: str, channel: Connection) -> None:
    """The same for a process that makes one run after the other, until the doctor closes ``channel``."""
    place = _set_apart(directory)
    import_module(WORKER).serve_each(place, channel, redirect)
    os._exit(0)


def _set_apart(directory: str) -> Path:
    os.setsid()  # so that the doctor can stop the process together with everything that it starts
    place = Path(directory)
    redirect(place)
    _leave_with_the_doctor()
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


def run_script_of(request: Request, directory: Path, **options: Any) -> Run:
    """Runs the script of a scenario, see :func:`dtypedoctor.runner.process.run_script`."""
    scenario = request.scenario
    return run_script(command_of(scenario), asked_of(request), directory, time_limit=scenario.time_limit, **options)


def asked_of(request: Request) -> dict[str, Any]:
    """What the processes of a script are asked for."""
    asked = request.model_dump(mode="json")
    if request.scenario.conditions or request.scenario.corrections:
        asked["changes"] = "dtypedoctor.lab.corrections.interventions:Changes"
    return asked


def command_of(scenario: Scenario) -> list[str]:
    """The command that a scenario's script stands for, as a shell would start it."""
    script = scenario.steps[0].workload
    assert isinstance(script, Script)  # whoever asks for a command has one
    processes = scenario.distributed.processes if scenario.distributed is not None else 0
    return Program(name=scenario.name, processes=processes, **script.model_dump(exclude={"kind"})).words


def _write_request(directory: Path, request: Request) -> None:
    """Writes down what the worker of ``directory`` is to do.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        write_request_file(directory, request.to_text())
    except OSError as error:
        raise UsageError(f"{directory}: cannot be written ({error.strerror})", "Give another --out.") from error
