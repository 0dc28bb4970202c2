"""Runs scenarios as jobs: in further processes of this machine, on a Ray cluster, or on Slurm by submitit.

A job is one picklable function, :func:`run_scenario`, submitted to an executor of :mod:`concurrent.futures`' shape. Nothing is sent: all
machines of a cluster have dtypedoctor, its libraries, the working directory and the run directory at the same paths.

What an executor raises is about its machines, never about the model: whatever a scenario does is the exit status of its command. So a job
whose executor raises is submitted again.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from dtypedoctor.errors import NodeLostError, UsageError, is_installed
from dtypedoctor.foreign_files import append_file
from dtypedoctor.guardian import end
from dtypedoctor.lab.scenarios.model import Scenario
from dtypedoctor.runner.process import Guardian

LOCAL, RAY, SLURM, SUBMITIT_LOCAL = "local", "ray", "slurm", "submitit-local"
EXECUTORS = (LOCAL, RAY, SLURM, SUBMITIT_LOCAL)
_NEEDS = {RAY: ("ray", "ray"), SLURM: ("submitit", "slurm"), SUBMITIT_LOCAL: ("submitit", "slurm")}
"""The library that an executor needs, and the extra that brings it."""

MOST_SUBMITTED = 3
"""How often a job is submitted whose machine is lost each time."""
WIDTH = 8
"""Jobs at a time on Slurm where nobody says."""
_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 20.0
_QUEUE_SECONDS = 10.0
"""Between two questions to Slurm."""
_FILES_SECONDS = 30.0
"""What a job leaves may be seen so late in a folder of a network."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """On which machines jobs run, as the command line says it.

    Attributes:
        executor: one of :data:`EXECUTORS`.
        slurm: parameters of Slurm's jobs.
        gpus: for each job; None for one where a scenario asks for CUDA.
        jobs: most at a time; None for what the executor thinks fit.
    """

    executor: str = LOCAL
    slurm: Mapping[str, str] = field(default_factory=dict)
    gpus: int | None = None
    jobs: int | None = None

    @property
    def one_by_one(self) -> bool:
        """Whether there are no jobs: scenarios run here, one after the other."""
        return self.executor == LOCAL and (self.jobs or 1) == 1

    def fitting(self, scenarios: Iterable[Scenario]) -> "Where":
        """Return the same with the GPUs that the scenarios need; None where they take what there is."""
        devices = {scenario.device for scenario in scenarios}
        needed = 1 if "cuda" in devices else 0 if devices == {"cpu"} else None
        return self if self.gpus is not None or self.executor == LOCAL else replace(self, gpus=needed)


def require_executor(where: Where) -> None:
    """Check that an executor can be used, without importing it.

    Raises:
        UsageError: there is no such executor, its library is not installed, or an option belongs to another one.
    """
    if where.executor not in EXECUTORS:
        raise UsageError(f"there is no executor {where.executor!r}", f"Give one of {', '.join(EXECUTORS)}.")
    package, extra = _NEEDS.get(where.executor, ("", ""))
    if package and not is_installed(package):
        raise UsageError(
            f"--executor {where.executor} needs {package}, which is not installed",
            f"Install it: pip install 'dtypedoctor[{extra}]'",
        )
    for option, given, owners in (
        ("--slurm", bool(where.slurm), (SLURM,)),
        ("--gpus", where.gpus is not None, (RAY, SLURM, SUBMITIT_LOCAL)),
    ):
        if given and where.executor not in owners:
            owner = " or ".join(owners[:2])
            raise UsageError(
                f"{option} has no effect with --executor {where.executor}", f"Pass --executor {owner} with it."
            )


@dataclass(frozen=True, kw_only=True)
class Job:
    """One command.

    Attributes:
        name: what a person knows it by.
        command: arguments of Python on the machine that runs it.
        log: file for what it prints.
        limit: seconds after which it is stopped.
        folder: its working directory.
    """

    name: str
    command: Sequence[str]
    log: Path
    limit: float
    folder: Path


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the command of a job ended: its exit status, whether its time limit was over, and its wall-clock time."""

    status: int
    timed_out: bool
    seconds: float


def run_scenario(job: Job, begun: Callable[["subprocess.Popen[bytes]"], None] = lambda _: None) -> Ended:
    """Run the command of a job on the machine that this is called on; ``begun`` is called with its process.

    Raises:
        RuntimeError: somebody has killed the command. It outlives every death of a model, which is a process that it starts, so this is
            the machine's doing.
    """
    began, timed_out = time.monotonic(), False
    with Guardian() as guardian, append_file(job.log) as log:
        process = subprocess.Popen(
            [sys.executable, *job.command], cwd=job.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )  # fmt: skip
        with guardian.ending(process):  # also where this process is killed
            begun(process)
            try:
                process.wait(job.limit)
            except subprocess.TimeoutExpired:
                timed_out = True
                end(process.pid)
                process.wait()
    if process.returncode < 0 and not timed_out:
        raise RuntimeError(f"the command was killed by signal {-process.returncode}")
    return Ended(status=process.returncode, timed_out=timed_out, seconds=time.monotonic() - began)


def run_jobs(
    executor: Executor, jobs: Sequence[Job], say: Callable[[str], None]
) -> Iterator[tuple[Job, Ended | NodeLostError]]:
    """Run jobs, and yield each with how it ended, in the order in which they do.

    Args:
        executor: runs them, and runs a job again whose machine is lost.
        jobs: what to run.
        say: is called with what the user should know.
    """
    submitted: dict[Future[Ended], tuple[Job, int]] = {executor.submit(run_scenario, job): (job, 1) for job in jobs}
    while submitted:
        done, _ = wait_for(submitted, _POLL_SECONDS, FIRST_COMPLETED)
        for future in done:
            job, times = submitted.pop(future)
            lost = future.exception()
            if lost is None:
                yield job, future.result()
                continue
            why = f"{type(lost).__name__}: {str(lost).strip().partition(chr(10))[0][:150]}".removesuffix(": ")
            if times < MOST_SUBMITTED:
                say(f"{job.name}: its machine was lost ({why}); submitted again")
                submitted[executor.submit(run_scenario, job)] = job, times + 1
            else:
                hint = "Look at the log of the cluster, then continue with --resume."
                yield job, NodeLostError(f"not run: node lost, {times} times ({why})", hint)


@contextmanager
def machines(where: Where, folder: Path, seconds: float) -> Iterator[Executor]:
    """Yield the executor; when the block is left, what still runs is ended.

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
        if where.executor == RAY:
            executor: Executor = RayExecutor(where)
        elif where.executor == LOCAL:
            executor = LocalExecutor(where.jobs or 1)
        else:
            executor = SubmititExecutor(where, folder, seconds)
        try:
            yield executor
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


class LocalExecutor(ThreadPoolExecutor):
    """Runs jobs in threads of this process. Their commands have sessions of their own, so Ctrl-C reaches them through :meth:`shutdown`."""

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
    """Runs each job as a task of a Ray cluster: that of ``RAY_ADDRESS``, else the one that runs on this machine.

    Raises:
        UsageError: it cannot be reached, or has not so many GPUs.
    """

    def __init__(self, where: Where) -> None:
        self._ray = ray = import_module("ray")
        address = os.environ.get("RAY_ADDRESS", "auto")
        host, colon, port = address.rpartition("//")[2].rpartition(":")
        try:
            if colon and port.isdecimal():  # Ray would try for minutes
                socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            text = str(error).strip().partition("\n")[0]
            raise UsageError(
                f"cannot reach the Ray cluster {address}: {text}",
                "Start one (`ray start --head`), or name it by RAY_ADDRESS=HOST:PORT.",
            ) from error
        there = int(ray.cluster_resources().get("GPU", 0))
        gpus = min(1, there) if where.gpus is None else where.gpus
        if gpus > there:
            ray.shutdown()
            raise UsageError(f"a job needs {gpus} GPUs, the Ray cluster has {there}", "Pass --gpus 0 or --device cpu.")
        self._options = {"num_cpus": 1, "num_gpus": gpus, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        self._running: dict[Future[Any], Any] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """See :class:`concurrent.futures.Executor`."""
        reference = self._ray.remote(**self._options)(fn).remote(*args, **kwargs)
        future: Future[Any] = reference.future()
        self._running[future] = reference
        future.add_done_callback(self._is_over)
        return future

    def _is_over(self, future: "Future[Any]") -> None:
        reference = self._running.pop(future)
        if future.cancelled():
            self._ray.cancel(reference, force=True)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See :class:`concurrent.futures.Executor`."""
        for future in list(self._running) if cancel_futures else ():
            future.cancel()
        self._ray.shutdown()


class SubmititExecutor(Executor):
    """Runs each job as one of Slurm, or of submitit's local executor, with its files in ``folder`` and ``seconds`` of time.

    Raises:
        UsageError: there is no Slurm on this machine, or it has no such parameter.
    """

    def __init__(self, where: Where, folder: Path, seconds: float) -> None:
        submitit = import_module("submitit")
        minutes = int(seconds // 60) + 5
        on_slurm = where.executor == SLURM
        given: dict[str, Any] = {"time" if on_slurm else "timeout_min": minutes}
        if where.gpus:
            given["gpus_per_node"] = where.gpus
        if on_slurm:
            given |= _SUBMITTED_ONCE
            given |= {key: int(text) if text.isdigit() else text for key, text in where.slurm.items()}
        try:
            self.engine = (submitit.SlurmExecutor if on_slurm else submitit.LocalExecutor)(folder=folder)
            self.engine.update_parameters(**given)
        except RuntimeError as error:
            raise UsageError(f"--executor {where.executor}: {error}", "Run it where sbatch and srun are.") from error
        except (ValueError, TypeError) as error:
            wrong, _, known = str(error).partition("\n")
            raise UsageError(f"--slurm: {wrong}", known) from error
        self._queue = _SlurmQueue() if on_slurm else None
        self._closing = threading.Event()
        self._waiting = ThreadPoolExecutor(where.jobs or WIDTH)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """See :class:`concurrent.futures.Executor`."""
        return self._waiting.submit(self._through, fn, args, kwargs)

    def _through(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        submitted = self.engine.submit(fn, *args, **kwargs)
        while not self._is_over(submitted):
            if self._closing.wait(_POLL_SECONDS):
                submitted.cancel(check=False)
                raise CancelledError
        return submitted.result()

    def _is_over(self, submitted: Any) -> bool:
        """Whether a job has left its result.

        Raises:
            RuntimeError: it is over and has left none: its machine is lost.
        """
        if self._queue is None:
            return bool(submitted.done())
        result = submitted.paths.result_pickle
        # The folder is listed: of a single name a network's folder may say for a minute what it was.
        if result.name in os.listdir(result.parent):
            return True
        if self._queue.holds(submitted.job_id) or self._closing.wait(_FILES_SECONDS):
            return False
        if result.name not in os.listdir(result.parent):
            raise RuntimeError(f"Slurm's job {submitted.job_id} is over and has left no result")
        return True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See :class:`concurrent.futures.Executor`."""
        if cancel_futures:
            self._closing.set()
        self._waiting.shutdown(wait, cancel_futures=cancel_futures)


_SUBMITTED_ONCE = {"additional_parameters": {"no-requeue": True}}
"""Else Slurm starts a job again whose machine is lost, beside the one that is submitted again."""


class _SlurmQueue:
    """The jobs of this user that wait or run. ``squeue`` is asked: submitit asks ``sacct``, which knows nothing where Slurm keeps no accounts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = -_QUEUE_SECONDS
        self._jobs: frozenset[str] | None = None

    def holds(self, job_id: str) -> bool:
        """Whether a job waits or runs; it does where Slurm does not answer."""
        command = ["squeue", "--noheader", "--user", str(os.getuid()), "--format", "%A"]
        with self._lock:
            known = self._jobs is None or job_id in self._jobs
            if not known or time.monotonic() >= self._asked + _QUEUE_SECONDS:
                self._asked, self._jobs = time.monotonic(), None
                with suppress(OSError, subprocess.SubprocessError):
                    done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True)
                    self._jobs = frozenset(done.stdout.split())
            return self._jobs is None or job_id in self._jobs
