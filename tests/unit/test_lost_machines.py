"""Jobs on executors that lose machines, and how that is told from what a model does."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scenario_files import HEALTHY, written

from dtypedoctor.errors import ExitCode, NodeLostError, UsageError
from dtypedoctor.lab.cli.run import run
from dtypedoctor.lab.runner import executors
from dtypedoctor.lab.runner.executors import (
    MOST_SUBMITTED,
    Ended,
    Job,
    SubmititExecutor,
    Where,
    _SlurmQueue,
    machines,
    require_executor,
    run_jobs,
    run_scenario,
)


class Losing(Executor):
    """Loses the machine of its first calls; the others run in a thread."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.calls = 0
        self._threads = ThreadPoolExecutor(1)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """As an executor does."""
        self.calls += 1
        if self.left:
            self.left -= 1
            future: Future[Any] = Future()
            future.set_exception(ConnectionError("the node died"))
            return future
        return self._threads.submit(fn, *args, **kwargs)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    """Makes a job that runs a program in Python."""

    def made(program: str, *, limit: float = 120.0) -> Job:
        return Job(name="one", command=["-c", program], log=tmp_path / "log.txt", limit=limit, folder=tmp_path)

    return made


def to_its_end(executor: Executor, job: Job) -> tuple[Ended | NodeLostError, list[str]]:
    """How the job has ended, and what the user was told."""
    said: list[str] = []
    [(_, ended)] = run_jobs(executor, [job], said.append)
    return ended, said


def test_a_lost_machine_is_not_the_models_failure(job: Callable[..., Job], tmp_path: Path) -> None:
    """The job is submitted again, and the user is told of it."""
    executor = Losing(2)
    ended, said = to_its_end(executor, job("print('done')"))
    assert isinstance(ended, Ended)
    assert (ended.status, executor.calls, len(said)) == (0, 3, 2)
    assert (tmp_path / "log.txt").read_text() == "done\n"
    assert "one: its machine was lost (ConnectionError: the node died)" in said[0]


def test_a_job_is_not_submitted_for_ever(job: Callable[..., Job]) -> None:
    """After some times nothing is known of it, which is an exit code of its own."""
    executor = Losing(100)
    ended, _ = to_its_end(executor, job("print('done')"))
    assert isinstance(ended, NodeLostError)
    assert "node lost" in ended.message
    assert executor.calls == MOST_SUBMITTED
    assert ended.exit_code is ExitCode.NO_TRACE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_killed_is_the_machines_doing(number: signal.Signals, job: Callable[..., Job]) -> None:
    """It outlives whatever kills the process of a model; a scheduler or the kernel has killed the command itself."""
    ended, said = to_its_end(ThreadPoolExecutor(1), job(f"import os; os.kill(os.getpid(), {int(number)})"))
    assert isinstance(ended, NodeLostError)
    assert len(said) == MOST_SUBMITTED - 1


def test_an_exit_status_is_a_result(job: Callable[..., Job]) -> None:
    """Whatever a scenario comes to is told as it is, at once."""
    ended, said = to_its_end(ThreadPoolExecutor(1), job("raise SystemExit(10)"))
    assert isinstance(ended, Ended)
    assert (ended.status, said) == (10, [])


def test_a_time_limit_ends_a_job_and_all_that_it_has_started(job: Callable[..., Job]) -> None:
    """It is no lost machine, so it is not submitted again."""
    ended, said = to_its_end(ThreadPoolExecutor(1), job("import time; time.sleep(1000)", limit=0.5))
    assert isinstance(ended, Ended)
    assert ended.timed_out
    assert not said


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (Where(executor="dask"), "there is no executor 'dask'"),
        (Where(slurm={"account": "lab"}), "--slurm has no effect with --executor local"),
        (Where(gpus=0), "--gpus has no effect with --executor local"),
    ],
)
def test_what_cannot_be_meant_is_refused(where: Where, words: str) -> None:
    """Before anything is imported or sent."""
    with pytest.raises(UsageError, match=words):
        require_executor(where)


@pytest.mark.parametrize("text", ["account", "=lab", "account=", ""])
def test_a_parameter_of_slurm_needs_a_name_and_a_value(text: str) -> None:
    """Before Slurm is looked for."""
    with pytest.raises(UsageError, match="a parameter is KEY=VALUE"):
        run(["gemma4_grpo_fp16"], executor="slurm", slurm=[text])


def test_jobs_of_one_scenario_are_refused(tmp_path: Path) -> None:
    """There is nothing to run at the same time; a single job is what happens anyway."""
    with pytest.raises(UsageError, match="--jobs has no effect with one scenario"):
        run([str(written(tmp_path, HEALTHY))], jobs=2, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, and what to type."""
    monkeypatch.setattr("dtypedoctor.lab.runner.executors.is_installed", lambda package: False)
    for executor, package, extra in (("ray", "ray", "ray"), ("slurm", "submitit", "slurm")):
        with pytest.raises(UsageError, match=f"needs {package}, which is not installed") as refused:
            require_executor(Where(executor=executor))
        assert f"'dtypedoctor[{extra}]'" in refused.value.hint


def test_local_processes_are_an_executor_of_the_standard_library(tmp_path: Path) -> None:
    """As many at a time as are asked for."""
    with machines(Where(jobs=2), tmp_path / "jobs", 60) as executor:
        assert isinstance(executor, ThreadPoolExecutor)
        assert executor._max_workers == 2


def test_local_jobs_end_when_the_block_is_left(job: Callable[..., Job], tmp_path: Path) -> None:
    """With all that they have started, and those that wait for their turn are never begun."""
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    program = (
        "import os, subprocess, sys, time\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n"
        f"print(os.getpid(), one.pid, file=open({str(begun)!r}, 'w'), flush=True)\n"
        "time.sleep(1000)"
    )
    with machines(Where(jobs=1), tmp_path / "jobs", 1000) as executor:
        first, second = (executor.submit(run_scenario, job(program, limit=1000.0)) for _ in range(2))
        processes = list(map(int, begun.read_text().split()))
    assert "killed by signal 9" in str(first.exception())
    assert second.cancelled()
    assert len(processes) == 2
    while any(map(is_running, processes)):  # a kill is no more than on its way
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Whether it is there and has not ended; one that nobody waits for is a zombie then."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which submitit finds Slurm; nothing is submitted."""
    pytest.importorskip("submitit", reason="needs the extra dtypedoctor[slurm]")
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def test_a_job_of_slurm_gets_its_parameters_and_is_not_started_again_by_slurm(slurm: Path) -> None:
    """Parameters and GPUs stand in the file that sbatch is given."""
    where = Where(executor="slurm", slurm={"partition": "long", "account": "lab", "cpus_per_task": "4"}, gpus=1)
    with machines(where, slurm / "jobs", 7200) as executor:
        assert isinstance(executor, SubmititExecutor)
        lines = executor.engine._make_submission_file_text("COMMAND", "1").splitlines()
    options = ("no-requeue", "partition=long", "account=lab", "cpus-per-task=4", "gpus-per-node=1", "time=125")
    assert not {f"#SBATCH --{option}" for option in options} - set(lines)


def test_an_unknown_parameter_of_slurm_is_refused_with_those_that_there_are(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so is a machine without Slurm."""
    with pytest.raises(UsageError, match="--slurm: Unavailable parameter") as refused:
        SubmititExecutor(Where(executor="slurm", slurm={"acount": "lab"}), slurm / "jobs", 60)
    assert "account" in refused.value.hint
    (slurm / "srun").unlink()
    monkeypatch.setenv("PATH", str(slurm))
    with pytest.raises(UsageError, match="srun"):
        SubmititExecutor(Where(executor="slurm"), slurm / "jobs", 60)


def test_a_job_that_squeue_does_not_name_is_over_and_one_is_not_where_it_does_not_answer(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is newer than the last answer is asked for again; the others are not for a while."""
    squeue, asked = slurm / "squeue", slurm / "asked"
    squeue.write_text(f"#!/bin/sh\necho >> {asked}\ncat {slurm}/answer\n")
    squeue.chmod(0o755)
    monkeypatch.setattr(executors, "_QUEUE_SECONDS", 1e9)  # however long an answer takes, it is still the last one
    queue = _SlurmQueue()
    assert queue.holds("7"), "there is no answer"
    assert queue.holds("7"), "nor is it asked again at once"
    (slurm / "answer").write_text("7\n9\n")
    queue = _SlurmQueue()
    assert [queue.holds(one) for one in ("7", "9", "7", "8")] == [True, True, True, False]
    assert len(asked.read_text()) == 3
