"""Jobs on executors that lose machines, and how that is told from what a model does."""

import io
import os
import signal
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from scenario_files import HEALTHY, written

from dtypedoctor.cli.run import run
from dtypedoctor.errors import ExitCode, NodeLostError, UsageError
from dtypedoctor.runner import machines as runner_machines
from dtypedoctor.runner.job import HERE, OUT, PYTHON, perform
from dtypedoctor.runner.machines import (
    MOST_SUBMITTED,
    WIDTH,
    Job,
    SubmititExecutor,
    SubmittedJob,
    Where,
    _SlurmQueue,
    machines,
    require_executor,
    unpack,
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


def job(program: str, *, outlives: bool = False, limit: float = 120.0) -> Job:
    """One that runs a program in Python."""
    return Job(name="one", outlives=outlives, common={"a/b.txt": b"content"}, own={}, command=[PYTHON, "-c", program],
               environment={"GIVEN": "1"}, limit=limit)  # fmt: skip


def to_its_end(executor: Executor, one: Job) -> tuple[SubmittedJob, list[str]]:
    """The job when it has ended, and what the user was told."""
    said: list[str] = []
    submitted = SubmittedJob(executor, one, said.append)
    while not submitted.wait(1.0):
        pass
    return submitted, said


def test_a_job_runs_on_its_files_and_its_files_come_home(tmp_path: Path) -> None:
    """In a folder of its own, with its variables, and with the paths of that machine in its command."""
    program = (
        "import os, sys; from pathlib import Path; print('said');"
        "Path(sys.argv[1]).write_text(Path('a/b.txt').read_text() + os.environ['GIVEN'])"
    )
    ended = perform(
        {"a/b.txt": b"content"}, {"c.txt": b""}, [PYTHON, "-c", program, f"{HERE}{OUT}/run/x"], {"GIVEN": "1"}, 120
    )
    assert ended["status"] == 1  # the folder "run" is not made for it
    ended = perform(
        {"a/b.txt": b"content"},
        {f"{OUT}/run/c": b""},
        [PYTHON, "-c", program, f"{HERE}{OUT}/run/x"],
        {"GIVEN": "1"},
        120,
    )
    assert (ended["status"], ended["said"]) == (0, "said\n")
    unpack(ended["files"], "run", tmp_path, keep=("c",))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "content1")]


def test_a_lost_machine_is_not_the_models_failure() -> None:
    """The job is submitted again, and the user is told of it."""
    executor = Losing(2)
    submitted, said = to_its_end(executor, job("print('done')"))
    assert submitted.ended()["said"] == "done\n"
    assert executor.calls == 3
    assert len(said) == 2
    assert "one: its machine was lost (ConnectionError: the node died)" in said[0]


def test_a_job_is_not_submitted_for_ever() -> None:
    """After some times nothing is known of it, which is an exit code of its own."""
    executor = Losing(100)
    submitted, _ = to_its_end(executor, job("print('done')"))
    with pytest.raises(NodeLostError, match="node lost") as lost:
        submitted.ended()
    assert executor.calls == MOST_SUBMITTED
    assert lost.value.exit_code is ExitCode.NO_TRACE


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT])
def test_a_worker_that_dies_by_itself_is_a_result(number: signal.Signals) -> None:
    """Whatever kills the process of a model is told as it is, at once; only where the command outlives models it is the machine's doing."""
    program = f"import os; os.kill(os.getpid(), {int(number)})"
    executor = ThreadPoolExecutor(1)
    submitted, said = to_its_end(executor, job(program))
    assert submitted.ended()["status"] == -number
    assert not said
    submitted, said = to_its_end(executor, job(program, outlives=True))
    assert len(said) == MOST_SUBMITTED - 1
    with pytest.raises(NodeLostError):
        submitted.ended()


def test_a_scheduler_that_ends_a_worker_is_the_machines_doing() -> None:
    """No model sends itself SIGTERM."""
    submitted, _ = to_its_end(ThreadPoolExecutor(1), job("import os; os.kill(os.getpid(), 15)"))
    with pytest.raises(NodeLostError):
        submitted.ended()


def test_a_time_limit_ends_a_job_and_all_that_it_has_started() -> None:
    """It is no lost machine, so it is not submitted again."""
    submitted, said = to_its_end(ThreadPoolExecutor(1), job("import time; time.sleep(1000)", outlives=True, limit=0.5))
    assert submitted.ended()["timed_out"]
    assert not said


def test_files_come_home_to_their_directory_only(tmp_path: Path) -> None:
    """Whatever an archive of another machine says."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("run/good/file", "run/../bad", "other/file", "run//bad", "/run/bad"):
            file.writestr(name, "x")
    unpack(archive.getvalue(), "run", tmp_path / "home")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == ["home/good/file"]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (Where(executor="dask"), "there is no executor 'dask'"),
        (Where(address="a:1"), "--address has no effect with --executor local"),
        (Where(gpus=0), "--gpus has no effect with --executor local"),
        (Where(send=(Path("a"),)), "--send has no effect with --executor local"),
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
    monkeypatch.setattr("dtypedoctor.runner.machines.is_installed", lambda package: False)
    for executor, package, extra in (("ray", "ray", "ray"), ("slurm", "submitit", "slurm")):
        with pytest.raises(UsageError, match=f"needs {package}, which is not installed") as refused:
            require_executor(Where(executor=executor))
        assert f"'dtypedoctor[{extra}]'" in refused.value.hint


def test_local_processes_are_an_executor_of_the_standard_library(tmp_path: Path) -> None:
    """As many at a time as are asked for."""
    with machines(Where(jobs=2), tmp_path / "jobs", 60) as (executor, width):
        assert isinstance(executor, ThreadPoolExecutor)
        assert width == 2


def test_local_jobs_end_when_the_block_is_left(tmp_path: Path) -> None:
    """With all that they have started, and those that wait for their turn are never begun."""
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    program = (
        "import os, subprocess, sys, time\n"
        "one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], start_new_session=True)\n"
        f"print(os.getpid(), one.pid, file=open({str(begun)!r}, 'w'), flush=True)\n"
        "time.sleep(1000)"
    )
    with machines(Where(jobs=1), tmp_path / "jobs", 1000) as (executor, _):
        first, second = (SubmittedJob(executor, job(program, limit=1000.0), print) for _ in range(2))
        processes = list(map(int, begun.read_text().split()))
    assert first._future.result()["status"] == -signal.SIGKILL
    assert second._future.cancelled()
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


def test_a_job_of_slurm_gets_no_variable_of_this_process(slurm: Path) -> None:
    """sbatch would send all of them; partition, parameters and GPUs stand in the file that it is given."""
    where = Where(executor="slurm", partition="long", slurm={"account": "lab", "cpus_per_task": "4"}, gpus=1)
    with machines(where, slurm / "jobs", 7200) as (executor, width):
        assert isinstance(executor, SubmititExecutor)
        lines = executor.engine._make_submission_file_text("COMMAND", "1").splitlines()
    options = ("export=NONE", "partition=long", "account=lab", "cpus-per-task=4", "gpus-per-node=1", "time=125")
    assert not {f"#SBATCH --{option}" for option in options} - set(lines)
    assert lines.index("export SLURM_EXPORT_ENV=ALL") < next(at for at, line in enumerate(lines) if "COMMAND" in line)
    assert width == WIDTH


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


def test_a_job_that_squeue_does_not_name_is_over_and_one_is_not_where_it_does_not_answer(slurm: Path) -> None:
    """A job that is newer than the last answer is asked for again; the others are not for a while."""
    squeue, asked = slurm / "squeue", slurm / "asked"
    squeue.write_text(f"#!/bin/sh\necho >> {asked}\ncat {slurm}/answer\n")
    squeue.chmod(0o755)
    queue = _SlurmQueue()
    assert queue.holds("7"), "there is no answer"
    assert queue.holds("7"), "nor is it asked again at once"
    (slurm / "answer").write_text("7\n9\n")
    queue = _SlurmQueue()
    assert [queue.holds(one) for one in ("7", "9", "7", "8")] == [True, True, True, False]
    assert len(asked.read_text()) == 3


@pytest.mark.parametrize(("executor", "printed"), [("ray", ("", "a node died\n")), ("local", ("a node died\n", ""))])
def test_what_ray_prints_of_its_nodes_is_no_part_of_the_answer(
    executor: str,
    printed: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One of its threads prints to standard output when it hears of one."""
    monkeypatch.setattr(runner_machines, "require_executor", lambda where: None)
    monkeypatch.setattr(runner_machines, "_make", lambda *_: ThreadPoolExecutor(1))
    with machines(Where(executor=executor), tmp_path, 1.0) as (threads, _):
        threads.submit(print, "a node died").result()
    print("the answer")
    out, err = capsys.readouterr()
    assert (out, err) == (f"{printed[0]}the answer\n", printed[1])
