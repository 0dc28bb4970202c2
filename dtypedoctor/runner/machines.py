"""Runs jobs on other machines: on a Ray cluster, on Slurm by submitit, or in further processes of this one.

Each is a :class:`concurrent.futures.Executor`. What it raises is about its machines, never about the model: what a command
does, and be it that it dies, is a result. So a job whose executor raises is submitted again.
"""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYetError
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import field, replace
from importlib import import_module
from pathlib import Path
from time import monotonic
from typing import Any

from dtypedoctor.errors import NodeLostError, UsageError, is_installed
from dtypedoctor.guardian import end
from dtypedoctor.runner import job
from dtypedoctor.runner.job import Ended, perform
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.values import dataclass

LOCAL, RAY, SLURM, SUBMITIT_LOCAL = "local", "ray", "slurm", "submitit-local"
EXECUTORS = (LOCAL, RAY, SLURM, SUBMITIT_LOCAL)
_NEEDS = {RAY: ("ray", "ray"), SLURM: ("submitit", "slurm"), SUBMITIT_LOCAL: ("submitit", "slurm")}
"""The library that an executor needs, and the extra that holds it."""

MOST_SUBMITTED = 3
"""How often a job is submitted whose machine is lost each time."""
WIDTH = 8
"""Jobs at a time where nobody says and the executor does not know its machines."""
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 20.0
_QUEUE_SECONDS = 10.0
"""Between two questions to Slurm."""
_FILES_SECONDS = 30.0
"""What a job leaves may be seen so late in a folder of a network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """On which machines jobs run, as the command line says it.

    Attributes:
        executor: one of :data:`EXECUTORS`.
        address: of the Ray cluster.
        partition: of Slurm.
        slurm: further parameters of Slurm's jobs.
        gpus: for each job; None for one where a scenario asks for CUDA.
        jobs: most at a time; None for what the executor thinks fit.
        send: files and folders that are sent beside what the scenarios name.
        shared: folders that all machines have at the same path.
    """

    executor: str = LOCAL
    address: str | None = None
    partition: str | None = None
    slurm: Mapping[str, str] = field(default_factory=dict)
    gpus: int | None = None
    jobs: int | None = None
    send: tuple[Path, ...] = ()
    shared: tuple[Path, ...] = ()

    @property
    def is_elsewhere(self) -> bool:
        """Whether files have to be sent."""
        return self.executor != LOCAL

    def fitting(self, scenarios: Iterable[Scenario]) -> "Where":
        """The same with the GPUs that the scenarios need, of another machine; where those take what there is, the executor decides."""
        if self.executor == LOCAL:
            return self
        devices = {one.device for one in scenarios}
        needed = 1 if "cuda" in devices else 0 if devices == {"cpu"} else None
        return self if self.gpus is not None else replace(self, gpus=needed)


def require_executor(where: Where) -> None:
    """Checks that an executor can be used, without importing it.

    Raises:
        UsageError: there is no such executor, its library is not installed, or an option belongs to another one.
    """
    if where.executor not in EXECUTORS:
        raise UsageError(f"there is no executor {where.executor!r}", f"Give one of {', '.join(EXECUTORS)}.")
    if where.executor in _NEEDS:
        package, extra = _NEEDS[where.executor]
        if not is_installed(package):
            raise UsageError(
                f"--executor {where.executor} needs {package}, which is not installed",
                f"Install it: pip install 'dtypedoctor[{extra}]'",
            )
    misplaced = {
        "--address": where.address is not None and where.executor != RAY,
        "--partition": where.partition is not None and where.executor != SLURM,
        "--slurm": bool(where.slurm) and where.executor != SLURM,
        "--gpus": where.gpus is not None and not where.is_elsewhere,
        "--send": bool(where.send) and not where.is_elsewhere,
        "--shared": bool(where.shared) and not where.is_elsewhere,
    }
    for option in (name for name, given in misplaced.items() if given):
        owner = {"--address": RAY, "--partition": SLURM, "--slurm": SLURM}.get(option, "ray or slurm")
        raise UsageError(
            f"{option} has no effect with --executor {where.executor}", f"Pass --executor {owner} with it."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One command and its files; see :func:`dtypedoctor.runner.job.perform`.

    Attributes:
        name: what a person knows it by.
        outlives: whether the command outlives every death of a model, because that is a process which it starts.
    """

    name: str
    outlives: bool
    common: Mapping[str, bytes]
    own: Mapping[str, bytes]
    command: Sequence[str]
    environment: Mapping[str, str]
    limit: float
    folder: str | None = None


class SubmittedJob:
    """A job that may still be running.

    Args:
        executor: runs it, and runs it again where a machine is lost.
        job: what to run.
        say: is called with what the user should know.
    """

    def __init__(self, executor: Executor, job: Job, say: Callable[[str], None]) -> None:
        self._executor = executor
        self._job = job
        self._say = say
        self._submitted = 0
        self._future = self._submit()

    def _submit(self) -> "Future[Ended]":
        self._submitted += 1
        one = self._job
        return self._executor.submit(
            perform, one.common, one.own, one.command, one.environment, one.limit, one.folder
        )  # fmt: skip

    def wait(self, seconds: float) -> bool:
        """Waits at most so long; whether it has ended."""
        try:
            lost = self._future.exception(seconds) or self._killed()
        except NotYetError:
            return False
        except CancelledError:
            return True
        if lost is None or self._submitted == MOST_SUBMITTED:
            return True
        self._say(f"{self._job.name}: its machine was lost ({_in_short(lost)}); submitted again")
        self._future = self._submit()
        return False

    def stop(self) -> None:
        """Ends it."""
        self._future.cancel()

    def ended(self) -> Ended:
        """How its command ended.

        Raises:
            NodeLostError: no machine has run it to its end.
        """
        if self._future.cancelled():
            raise KeyboardInterrupt
        lost = self._future.exception() or self._killed()
        if lost is not None:
            raise NodeLostError(
                f"not run: node lost, {self._submitted} times ({_in_short(lost)})",
                "Look at the log of the cluster, then continue with --resume.",
            )
        return self._future.result()

    def _killed(self) -> BaseException | None:
        """A scheduler has ended the command, or somebody has killed it who did not mean the model."""
        ended = self._future.result()
        if ended["status"] >= 0 or ended["timed_out"]:
            return None
        if not self._job.outlives and ended["status"] != -signal.SIGTERM:
            return None
        return RuntimeError(f"the command was killed by signal {-ended['status']}")


def _in_short(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:150]}" if text else type(error).__name__


@contextmanager
def machines(where: Where, folder: Path, seconds: float) -> Iterator[tuple[Executor, int]]:
    """The executor, and how many jobs it takes at a time. When the block is left, what still runs is ended.

    Args:
        where: which one.
        folder: for what submitit writes; with Slurm all machines must have it.
        seconds: that a job may take at most.

    Raises:
        UsageError: it cannot be used, or there is no such cluster.
    """
    require_executor(where)
    # Ray prints to stdout what it hears of its nodes, and that is for the answer
    with redirect_stdout(sys.stderr) if where.executor == RAY else nullcontext():
        executor = _make(where, folder, seconds)
        try:
            yield executor, where.jobs or int(getattr(executor, "width", 1))
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _make(where: Where, folder: Path, seconds: float) -> Executor:
    if where.executor == RAY:
        return RayExecutor(where)
    if where.executor == LOCAL:
        return LocalExecutor(where.jobs or 1)
    return SubmititExecutor(where, folder, seconds)


class LocalExecutor(ThreadPoolExecutor):
    """Runs calls of :func:`dtypedoctor.runner.job.perform` here. Their commands have sessions of their own, so Ctrl-C does not reach them."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._closing = False
        self._processes: list[subprocess.Popen[bytes]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """See :class:`concurrent.futures.Executor`."""
        return super().submit(fn, *args, begun=self._begun, **kwargs)

    def _begun(self, process: "subprocess.Popen[bytes]") -> None:
        self._processes.append(process)
        if self._closing:  # it has begun while the others were ended
            end(process.pid)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See :class:`concurrent.futures.Executor`; with ``cancel_futures`` what runs is ended too."""
        super().shutdown(wait=False, cancel_futures=cancel_futures)
        self._closing = cancel_futures
        for process in list(self._processes) if cancel_futures else ():
            if process.poll() is None:
                end(process.pid)
        super().shutdown(wait)


class RayExecutor(Executor):
    """Runs each call as a task of a Ray cluster.

    Args:
        where: names the cluster; where it does not, ``RAY_ADDRESS`` or the one that runs on this machine.

    Raises:
        UsageError: it cannot be reached.
    """

    def __init__(self, where: Where) -> None:
        self._ray = ray = import_module("ray")
        address = where.address or os.environ.get("RAY_ADDRESS", "auto")
        try:
            _require_answer(address)  # Ray would try for minutes
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            text = str(error).strip().partition("\n")[0]
            raise UsageError(
                f"cannot reach the Ray cluster {where.address or ''}".rstrip() + f": {text}",
                "Start one (`ray start --head`), or name it by --address HOST:PORT.",
            ) from error
        ray.cloudpickle.register_pickle_by_value(job)  # machines need not have dtypedoctor
        there = int(ray.cluster_resources().get("GPU", 0))
        gpus = min(1, there) if where.gpus is None else where.gpus
        if gpus > there:
            ray.shutdown()
            raise UsageError(f"a job needs {gpus} GPUs, the Ray cluster has {there}", "Pass --gpus 0 or --device cpu.")
        self._options = {"num_cpus": 1, "num_gpus": gpus, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        self._kept: dict[int, tuple[object, Any]] = {}
        self._running: dict[Future[Any], Any] = {}
        workers = sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
        self.width = max(1, there // gpus if gpus else workers)
        """Jobs at a time: one for each GPU, or for each machine."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """See :class:`concurrent.futures.Executor`."""
        remote = self._ray.remote(**self._options)(fn)
        reference = remote.remote(*map(self._stored, args), **kwargs)
        future: Future[Any] = reference.future()
        self._running[future] = reference
        future.add_done_callback(self._is_over)
        return future

    def _is_over(self, future: "Future[Any]") -> None:
        reference = self._running.pop(future)
        if future.cancelled():
            self._ray.cancel(reference, force=True)

    def _stored(self, argument: object) -> object:
        """Files that many calls are given are put into the cluster once."""
        if not isinstance(argument, dict):
            return argument
        if id(argument) not in self._kept:
            self._kept[id(argument)] = argument, self._ray.put(argument)
        return self._kept[id(argument)][1]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See :class:`concurrent.futures.Executor`."""
        for future in list(self._running) if cancel_futures else ():
            future.cancel()
        self._ray.shutdown()


def _require_answer(address: str) -> None:
    """Connects to ``HOST:PORT``, with or without ``ray://``; other addresses are left to Ray.

    Raises:
        OSError: nobody answers.
    """
    host, colon, port = address.rpartition("//")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()


class SubmititExecutor(Executor):
    """Runs each call as a job of Slurm, or of submitit's local executor.

    Args:
        where: which of the two, and its parameters.
        folder: where submitit keeps its files.
        seconds: that a job may take.

    Raises:
        UsageError: there is no Slurm on this machine, or it has no such parameter.
    """

    width = WIDTH

    def __init__(self, where: Where, folder: Path, seconds: float) -> None:
        submitit = import_module("submitit")
        import_module("cloudpickle").register_pickle_by_value(job)
        given: dict[str, Any] = {"timeout_min": int(seconds // 60) + 5, "gpus_per_node": where.gpus or 0}
        try:
            if where.executor == SLURM:
                self.engine = submitit.SlurmExecutor(folder=folder)
                given = {
                    "time": given["timeout_min"],
                    "gpus_per_node": given["gpus_per_node"] or None,
                    **_NOTHING_OF_OURS,
                }
                given |= {key: int(text) if text.isdigit() else text for key, text in where.slurm.items()}
                given |= {"partition": where.partition} if where.partition is not None else {}
            else:
                self.engine = submitit.LocalExecutor(folder=folder)
            self.engine.update_parameters(**{key: value for key, value in given.items() if value is not None})
        except RuntimeError as error:
            raise UsageError(f"--executor {where.executor}: {error}", "Run it where sbatch and srun are.") from error
        except (ValueError, TypeError) as error:
            wrong, _, known = str(error).partition("\n")
            raise UsageError(f"--slurm: {wrong}", known) from error
        self._queue = _SlurmQueue() if where.executor == SLURM else None
        self._closing = threading.Event()
        self._waiting = ThreadPoolExecutor(where.jobs or self.width)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """See :class:`concurrent.futures.Executor`."""
        return self._waiting.submit(self._through, fn, args, kwargs)

    def _through(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        submitted = self.engine.submit(fn, *args, **kwargs)
        while not self._is_over(submitted):
            if self._closing.wait(_POLL_SECONDS):
                submitted.cancel(check=False)
                raise CancelledError
        try:
            return submitted.result()
        finally:  # they hold all that was sent and all that came home
            for left in (submitted.paths.submitted_pickle, submitted.paths.result_pickle):
                left.unlink(missing_ok=True)

    def _is_over(self, submitted: Any) -> bool:
        """Whether a job has left its result.

        Raises:
            RuntimeError: it is over and has left none: its machine is lost.
        """
        if self._queue is None:
            return bool(submitted.done())
        result = submitted.paths.result_pickle
        if _is_there(result):
            return True
        if self._queue.holds(submitted.job_id) or self._closing.wait(_FILES_SECONDS):
            return False
        if not _is_there(result):
            raise RuntimeError(f"Slurm's job {submitted.job_id} is over and has left no result")
        return True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See :class:`concurrent.futures.Executor`."""
        if cancel_futures:
            self._closing.set()
        self._waiting.shutdown(wait, cancel_futures=cancel_futures)


class _SlurmQueue:
    """The jobs of this user that wait or run. ``squeue`` is asked, for submitit asks ``sacct``, and where Slurm keeps no accounts that knows of nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = -_QUEUE_SECONDS
        self._jobs: frozenset[str] | None = None

    def holds(self, job_id: str) -> bool:
        """Whether a job waits or runs; it does where Slurm does not answer."""
        with self._lock:
            if monotonic() < self._asked + _QUEUE_SECONDS and (self._jobs is None or job_id in self._jobs):
                return True
            self._asked = monotonic()
            self._jobs = _jobs_of_this_user()
            return self._jobs is None or job_id in self._jobs


def _jobs_of_this_user() -> frozenset[str] | None:
    """None where ``squeue`` does not answer."""
    command = ["squeue", "--noheader", "--user", str(os.getuid()), "--format", "%A"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return frozenset(done.stdout.split())


def _is_there(path: Path) -> bool:
    """Whether a file is in its folder. The folder is listed: of a single name a network's folder may say for a minute what it was."""
    return path.name in os.listdir(path.parent)


_NOTHING_OF_OURS = {
    # else sbatch sends every variable of this process, and Slurm starts a job again whose machine is lost, beside the one that is submitted again
    "additional_parameters": {"export": "NONE", "no-requeue": True},
    "setup": ["export SLURM_EXPORT_ENV=ALL"],  # but srun gives its task those of the machine
}


def unpack(files: bytes, below: str, place: Path, *, keep: Collection[str] = ()) -> None:
    """Writes what a job has left below a folder of its own into ``place``, which may exist, but for the names in ``keep``.

    Raises:
        OSError: it cannot be written.
    """
    with zipfile.ZipFile(io.BytesIO(files)) as archive:
        for one in archive.infolist():
            name = one.filename.removeprefix(f"{below}/")
            if name == one.filename or name in keep or ".." in Path(name).parts or name.startswith("/"):
                continue
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = (one.external_attr >> 16) & 0o666 or 0o600
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
                file.write(archive.read(one))
