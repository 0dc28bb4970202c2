"""Runs a script, or torchrun with one, in its own process group, and nothing is missing that a shell would give it.

Signals sent to this process go to the command, it has the terminal, its output is shown and kept, and it ends when this process is
killed. The ranks that torchrun starts leave a trace each; they are collected here.
"""

import contextlib
import json
import math
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import parse_json, read_file, working_directory
from dtypedoctor.guardian import PROGRAM, end
from dtypedoctor.interruptions import interrupt
from dtypedoctor.redaction.redact import forget_request
from dtypedoctor.runner.directories import make_directory
from dtypedoctor.runner.run import STDERR, Run, WorkerExit, collect, deleted, led_by, write_request
from dtypedoctor.runner.streams import Streams
from dtypedoctor.scenario.model import Request, Scenario, Script
from dtypedoctor.trace.ranks import child_directories, rank_directories, rank_directory

LONGEST_WAIT = 0.5
SECONDS_TO_END = 10.0
"""How long a script that nobody sees has to end when the command is asked to."""


def run_process(
    command: Sequence[str],
    directory: Path,
    *,
    live: bool,
    time_limit: float,
    meanwhile: Callable[[], None] = lambda: None,
    ranks: Sequence[Path] = (),
    stdin_is_read: bool = False,
    guardian: "Guardian | None" = None,
) -> WorkerExit:
    """Runs a command in a process group of its own until it ends or its time limit is over.

    Signals that this process is sent go to the command. If this process is killed, the command is.

    Args:
        command: the program and its arguments.
        directory: where what it writes is kept.
        live: see :func:`run_script`.
        time_limit: seconds.
        meanwhile: called as soon as it runs, then now and then.
        stdin_is_read: standard input has been read to its end, and is not begun again.
        ranks: directories of the processes that it starts itself, whose output is shown and kept as well.
        guardian: see :func:`run_script`.
    """
    began = time.monotonic()
    with Streams(directory, live=live, ranks=ranks) as streams, PassedOn(streams.resize) as signals:
        with streams.ends() as (out, err), _standard_input(live, again=not stdin_is_read) as given:
            process = subprocess.Popen(command, stdin=given, stdout=out, stderr=err, process_group=0)
        with _ending(process, guardian), Foreground(process) if live else nullcontext() as foreground:
            signals.to(process)
            timed_out = not _wait(
                process,
                streams,
                lambda: min(began + time_limit, signals.deadline if not live else math.inf),
                lambda: signals.stop_together(foreground),
                meanwhile,
            )
        streams.show_rest()
        left = _left_running(process.pid, streams.names)
    return WorkerExit(
        code=process.wait(),
        timed_out=timed_out,
        seconds=time.monotonic() - began,
        asked_to_end=signals.asked_to_end,
        left=left,
    )


def _left_running(script: int, streams: AbstractSet[str]) -> str:
    """Processes that have loaded torch and are still there though the script has ended, in words.

    They are in its process group or session, or write to where it wrote; what has left all of these is not found.
    """
    running = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        process = Path("/proc", name)
        with contextlib.suppress(OSError):  # it is somebody else's, or has ended
            group, session = (process / "stat").read_bytes().rpartition(b")")[2].split()[2:4]
            is_its = script in (int(group), int(session)) or not streams.isdisjoint(_open_in(process))
            if is_its and b"libtorch" in (process / "maps").read_bytes():
                running.append(f"process {name} ({(process / 'comm').read_text().strip()})")
    return ", ".join(running)


def _open_in(process: Path) -> Iterator[str]:
    """What a process has as output and error."""
    for number in ("1", "2"):
        with contextlib.suppress(OSError):
            yield os.readlink(process / "fd" / number)


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
    process: "subprocess.Popen[bytes]",
    streams: Streams,
    deadline: Callable[[], float],
    *meanwhile: Callable[[], None],
) -> bool:
    """Waits for the process, showing what it writes; False if it had to be stopped at its time limit."""
    ended = os.pidfd_open(process.pid)
    try:
        while process.poll() is None:
            left = deadline() - time.monotonic()
            if left <= 0:
                end(process.pid)
                process.wait()
                return False
            for act in meanwhile:
                act()
            streams.show(min(left, LONGEST_WAIT), ended)
    finally:
        os.close(ended)
    return True


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


@contextlib.contextmanager
def _ending(process: "subprocess.Popen[bytes]", guardian: Guardian | None) -> Iterator[None]:
    """See :meth:`Guardian.ending`; where there is no guardian yet, one for this process alone."""
    with contextlib.ExitStack() as stack:
        try:
            guardian = guardian or stack.enter_context(Guardian())
        except OSError:
            _end_script(process)
            raise
        with guardian.ending(process):
            yield


def _end_script(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        end(process.pid)
        process.wait()


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
        self.deadline = math.inf
        """When a script that only this command is interested in has had its time to end."""

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
            self.deadline = min(self.deadline, time.monotonic() + SECONDS_TO_END)
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


BOOT = Path(__file__).resolve().parents[1] / "worker" / "boot.py"


def run_script(
    request: Request,
    directory: Path,
    *,
    live: bool,
    through: Sequence[str] = (),
    meanwhile: Callable[[], None] = lambda: None,
    guardian: Guardian | None = None,
) -> Run:
    """Runs the script of ``request``; everything it leaves lies in ``directory``, which must not exist yet.

    Args:
        request: what the script's process is to do.
        directory: for its trace and its output.
        live: give the script this process's standard input, and show what it writes. Otherwise what it writes is only
            kept, and it reads standard input again from the beginning if that is a file; else it reads nothing.
        through: program and arguments that stand before the command, and become it (:mod:`dtypedoctor.runner.view`).
        meanwhile: see :func:`run_process`.
        guardian: what ends the script if this process is killed; None for one of its own.

    Raises:
        UsageError: the directory cannot be written, or there is no such script.
    """
    make_directory(directory)
    write_request(directory, request)
    command = [*through, sys.executable, str(BOOT), str(directory.resolve())]
    workload = request.scenario.steps[0].workload
    read_up = isinstance(workload, Script) and workload.path == "-"  # the program itself has come from there
    ended = run_process(
        command,
        directory,
        live=live,
        time_limit=request.scenario.time_limit,
        meanwhile=meanwhile,
        stdin_is_read=read_up,
        guardian=guardian,
    )
    return _with_children(directory, ended) if directory.is_dir() else deleted(directory, ended)


def _with_children(directory: Path, ended: WorkerExit) -> Run:
    own = collect(directory, ended, foreign=True)
    spawned = child_directories(directory)
    return replace(own, children={number: collect(place, ended, foreign=True) for number, place in spawned.items()})


def collect_job(directory: Path, ended: WorkerExit) -> Run:
    """The run of processes that recorded themselves in ``directory``: of its ranks if it has any, as :func:`run_launched` tells of them,
    else of its first process and those that this started."""
    return _of_ranks(directory, ended) if rank_directories(directory) else _with_children(directory, ended)


def run_launched(
    request: Request,
    directory: Path,
    *,
    live: bool,
    through: Sequence[str] = (),
    meanwhile: Callable[[], None] = lambda: None,
    guardian: Guardian | None = None,
) -> Run:
    """Runs the script of ``request`` by its own launcher, with the launcher's options; see :func:`run_script`.

    Returns:
        The run of the rank that failed first, or of rank 0; its ``ranks`` are those that the launcher has started on this
        machine.

    Raises:
        UsageError: the directory cannot be written, or the launcher ended before it had started the script.
    """
    workload = request.scenario.steps[0].workload
    assert isinstance(workload, Script)  # whoever asks for a launcher has a script
    make_directory(directory)
    write_request(directory, request)
    module, *options = workload.launcher
    is_torchrun = module == _TORCHRUN
    shown = workload.path or workload.module or ""
    start = ["-P", str(ELASTIC), str(directory.resolve() / FAILURES), shown] if is_torchrun else ["-P", "-m", module]
    script = [str(BOOT), "--launched", str(directory.resolve())]
    try:
        ended = run_process(
            [*through, sys.executable, *start, *options, *script],
            directory,
            live=live,
            time_limit=request.scenario.time_limit,
            meanwhile=meanwhile,
            guardian=guardian,
        )
    finally:
        forget_request(directory)
    if not directory.is_dir():
        return deleted(directory, ended)
    if not rank_directories(directory):
        hint = "What it printed is above." if live else f"What it printed: {directory / STDERR}"
        raise UsageError(f"{module} ended with {ended.code} before it started {workload.path or workload.module}", hint)
    return _of_ranks(directory, ended)


def _of_ranks(directory: Path, ended: WorkerExit) -> Run:
    """The run of the rank that failed first, or of the first one, with all others."""
    ranks = rank_directories(directory)
    failures = _failures(directory)
    started = sorted({*ranks, *failures})  # one that failed before it came to the script has no directory
    runs = [
        collect_rank(rank_directory(directory, rank), rank, exit_of_rank(rank, ended, failures), foreign=True)
        for rank in started
    ]
    return led_by(tuple(runs), _first_failure(failures, default=min(ranks)))


def _first_failure(failures: dict[int, dict[str, Any]], *, default: int) -> int:
    """The rank that failed first. Times are whole seconds, and whom torchrun ended by SIGTERM may share that of the rank that failed."""

    def order(rank: int) -> tuple[bool, float]:
        failure = failures[rank]
        return int(failure["code"]) == -signal.SIGTERM, float(failure["time"])

    return min(failures, key=order, default=default)


_TORCHRUN = "torch.distributed.run"
ELASTIC = BOOT.with_name("elastic.py")
FAILURES = "failures.json"
LOGS = "torchrun"
"""Folder of torchrun's own logs."""


def run_ranks(
    request: Request,
    directory: Path,
    *,
    live: bool,
    progress: Callable[[Path], None] = lambda _: None,
    through: Sequence[str] = (),
    meanwhile: Callable[[], None] = lambda: None,
    guardian: Guardian | None = None,
) -> Run:
    """Runs ``request`` in as many processes as its scenario says, on this machine.

    Args:
        request: what each of them is to do.
        directory: holds afterwards a directory for each rank, and what torchrun itself printed; must not exist yet.
        live: show what the processes write, as it comes.
        progress: called now and then, while they run, with the directory of rank 0.
        through: see :func:`run_script`.
        meanwhile: see :func:`run_process`.
        guardian: see :func:`run_script`.

    Returns:
        The run of the rank that failed first, or of rank 0; its ``ranks`` are those of all.

    Raises:
        UsageError: the directory cannot be written, or the scenario cannot be run at all.
    """
    assert request.scenario.distributed is not None  # whoever asks for ranks says how many
    count = request.scenario.distributed.processes
    make_directory(directory)
    for rank in range(count):
        place = rank_directory(directory, rank)
        make_directory(place)
        write_request(place, request_of_rank(request, rank))
    command = [*through, sys.executable, "-P", *_torchrun(directory.resolve(), request.scenario, count)]
    places = [rank_directory(directory, rank) for rank in range(count)]

    def act() -> None:
        meanwhile()
        progress(places[0])

    ended = run_process(
        command,
        directory,
        live=live,
        time_limit=request.scenario.time_limit,
        meanwhile=act,
        ranks=places,
        guardian=guardian,
    )
    foreign = isinstance(request.scenario.steps[0].workload, Script)
    if foreign and not directory.is_dir():
        return deleted(directory, ended)
    failures = _failures(directory)
    runs = [
        collect_rank(rank_directory(directory, rank), rank, exit_of_rank(rank, ended, failures), foreign=foreign)
        for rank in range(count)
    ]
    return led_by(tuple(runs), _first_failure(failures, default=0))


def unless_interrupted(run: Run) -> Run:
    """A run that came to its own end.

    Raises:
        KeyboardInterrupt: a signal to this process asked it to end. That ends the command, and is no outcome of the run.
    """
    asked = run.exit.asked_to_end
    if asked:
        raise KeyboardInterrupt(f"interrupted by {signal.Signals(asked).name}")
    return run


def _torchrun(directory: Path, scenario: Scenario, count: int) -> list[str]:
    workload = scenario.steps[0].workload
    program = workload.path or workload.module if isinstance(workload, Script) else None
    return [
        str(ELASTIC),
        str(directory / FAILURES),
        program or scenario.name,
        "--standalone",
        f"--nproc-per-node={count}",
        f"--log-dir={directory / LOGS}",
        str(BOOT),
        "--rank",
        str(directory),
    ]


def request_of_rank(request: Request, rank: int) -> Request:
    """The request as one rank gets it: what it repeats is what the same rank did before."""
    if request.repeats is None:
        return request
    return request.model_copy(update={"repeats": str(rank_directory(Path("..") / request.repeats, rank))})


def _failures(directory: Path) -> dict[int, dict[str, Any]]:
    try:
        found = parse_json(read_file(directory / FAILURES))
        return {int(rank): {"code": int(told["code"]), "time": float(told["time"])} for rank, told in found.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none has failed, or torchrun itself was ended
        return {}


def collect_rank(place: Path, rank: int, ended: WorkerExit, *, foreign: bool = False) -> Run:
    """One rank's run, which lies in ``place`` and ended so.

    One that was asked to end while it was ending by itself is taken at the word of its trace.
    """
    run = collect(place, ended, foreign=foreign)
    end = run.trace.end
    if end is not None and run.exit.code == -signal.SIGTERM and not ended.timed_out:
        run = collect(place, replace(run.exit, code=int(end.outcome != "completed")), foreign=foreign)
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
