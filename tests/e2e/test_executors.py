"""Scenarios and probes on a real Ray cluster of two nodes and on submitit's executor, also where a machine is killed."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest
from command import dtypedoctor, in_this_process, report_of
from patience import PATIENCE, becomes

from dtypedoctor.guardian import end
from dtypedoctor.runner.job import PACKAGE, PYTHON
from dtypedoctor.runner.machines import Job, SubmittedJob, Where, machines
from dtypedoctor.runner.run import WorkerExit
from dtypedoctor.runner.sending import RemoteRun, packed
from dtypedoctor.scenario.model import Request, Scenario

TOKEN = "hf_" + "aB3dE5gH7jK9mN1pQ3rS5tU7vW9xY1zA3b"

HEALTHY = {
    "name": "own",
    "summary": "A model of one's own.",
    "steps": [{"model": {"name": "network:make"}, "workload": {"kind": "forward"}}],
}
NETWORK = """
import os
from types import SimpleNamespace
from torch import nn

class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=64)
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        return SimpleNamespace(logits=logits, loss=logits.float().square().mean() if labels is not None else None)

def make():
    assert "SECRET_OF_THE_USER" not in os.environ and not os.path.exists(".env"), "a secret has come along"
    return LanguageModel()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a scenario, the model that it names, and a secret."""
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "own.yaml").write_text(json.dumps(HEALTHY))
    (tmp_path / "network.py").write_text(NETWORK)
    (tmp_path / ".env").write_text(f"TOKEN={TOKEN}")
    return tmp_path


def until(holds: Callable[[], Any]) -> Any:
    """What ``holds`` returns once that is something."""
    found: list[Any] = []

    def look() -> Any:
        time.sleep(0.1)  # looking at all processes takes a while itself
        found.append(holds())
        return found[-1]

    assert becomes(look)
    return found[-1]


def running(below: int, words: str) -> bool:
    """Whether a process runs a command with these words, and descends from another."""
    parents, commands = {}, {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            parents[int(name)] = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(name)] = Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue

    def descends(process: int) -> bool:
        return process == below or (process in parents and descends(parents[process]))

    return any(words in command and descends(process) for process, command in commands.items() if process in parents)


SOON_LOST = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}
"""Ray asks nodes more often whether they live; each has as long as ever to answer, but one that was killed refuses at once."""


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A Ray cluster with a head that runs nothing and two nodes that run a job each."""
    pytest.importorskip("ray", reason="needs the extra dtypedoctor[ray]")
    from ray.cluster_utils import Cluster

    one = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": False,
            "object_store_memory": 80 << 20,
            "_system_config": SOON_LOST,
        },
    )
    try:
        yield one, [one.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
    finally:
        for process in list(map(raylet_of, one.list_all_nodes())):
            end(process)  # with the workers, which would go on for a while
        one.shutdown()


def raylet_of(node: Any) -> int:
    """The process that is a node of Ray."""
    return int(node.all_processes["raylet"][0].process.pid)


@pytest.mark.release
def test_a_scenario_whose_node_is_killed_runs_on_the_other_one(cluster: Any, project: Path) -> None:
    """The report is complete and no secret has come along; ``--resume`` then finds nothing left to do."""
    one, nodes = cluster
    command = [sys.executable, "-m", "dtypedoctor", "run", "scenarios", "--out", "out", "--no-remedies"]
    where = ["--executor", "ray", "--address", one.address]
    with (project / "err").open("wb") as err:
        started = subprocess.Popen(
            [*command, *where], cwd=project, stdout=subprocess.PIPE, stderr=err,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "SECRET_OF_THE_USER": TOKEN},
        )  # fmt: skip
    try:
        raylets = [raylet_of(node) for node in nodes]
        end(until(lambda: next((one for one in raylets if running(one, "dtypedoctor run")), 0)))
        out, _ = started.communicate(timeout=PATIENCE)
    finally:
        started.kill()
        started.wait()
    said = (project / "err").read_text()
    assert started.returncode == 0, said
    assert "own: its machine was lost" in said
    assert "1 of 1 scenario as expected" in out.decode()
    assert report_of(project / "out" / "own")["status"] == "healthy"
    assert (project / "out" / "own" / "before" / "events.jsonl").exists()
    listed = json.loads((project / "out" / "sent.json").read_text())
    assert [name for name in listed["files"] if not name.startswith(f"{PACKAGE}/")] == ["network.py"]
    again = dtypedoctor("run", "--resume", "out", cwd=project)
    assert (again.code, "1 of 1 scenario as expected" in again.out) == (0, True)
    assert "1/1" not in again.err


OVERFLOWS = """
from network import LanguageModel

class Overflowing(LanguageModel):
    def forward(self, input_ids, labels=None):
        found = super().forward(input_ids, labels)
        found.logits = found.logits * 1e6 / 1e6
        return found

make = Overflowing
"""


@pytest.fixture(scope="module")
def bisected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bisection that was made here, with its answer; once for all tests that go on with a copy of it."""
    project = tmp_path_factory.mktemp("bisected")
    (project / "network.py").write_text(NETWORK)
    (project / "overflows.py").write_text(OVERFLOWS)
    made = in_this_process("bisect", "--model", "overflows:make", "--workload", "forward", "--out", "here", cwd=project)
    assert made.code == 10, made.err
    return project / "here"


def interrupted(bisected: Path, name: str, probes: int) -> tuple[Path, set[str]]:
    """A copy of the bisection as it was before it had made the last of its probes, and these."""
    copy = bisected.with_name(name)
    shutil.copytree(bisected, copy)
    (copy / "report.json").unlink()
    lost = {f"probes/{path.name}" for path in sorted((copy / "probes").iterdir())[:probes]}
    for place in lost:
        shutil.rmtree(copy / place)
    return copy, lost


def answer(directory: Path) -> dict[str, Any]:
    """What a bisection has found, without what it took."""
    found = report_of(directory)["bisection"]
    said = ("end", "culprits", "corrections", "candidates", "one_minimal", "confirmed", "flaky", "failure")
    modes = [(verdict["mode"], verdict["outcome"], verdict["fqn"]) for verdict in found["verdicts"]]
    return {name: found[name] for name in said} | {"modes": modes}


def runs_of(directory: Path) -> list[str]:
    """The runs that a bisection has really made, in order."""
    events = map(json.loads, (directory / "bisection.jsonl").read_text().splitlines()[1:])
    return [event["place"] for event in events if event["event"] == "run"]


@pytest.mark.release
def test_a_bisection_goes_on_with_ray_and_a_lost_node_is_no_failing_probe(cluster: Any, bisected: Path) -> None:
    """It runs what is missing and nothing else, the probe of the killed node again on the other one, and finds what was found here."""
    one, nodes = cluster
    copy, lost = interrupted(bisected, "on-ray", 2)
    before = len(runs_of(copy))
    started = subprocess.Popen(
        [sys.executable, "-m", "dtypedoctor", "bisect", "--resume", copy.name, "--allow-code", "--executor", "ray", "--address", one.address,
         "--send", "network.py"],
        cwd=copy.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    try:
        raylets = [raylet_of(node) for node in nodes]
        end(until(lambda: next((one for one in raylets if running(one, "dtypedoctor.runner.launch")), 0)))
        out, err = started.communicate(timeout=PATIENCE)
    finally:
        started.kill()
        started.wait()
    assert started.returncode == 10, err
    assert err.count("its machine was lost") == 1
    assert out.startswith("Smallest fix: keep the outermost module's own operators in float32."), (
        "Ray's own messages are no answer"
    )
    assert answer(copy) == answer(bisected)
    assert sorted(runs_of(copy)[before:]) == sorted(lost)


@pytest.mark.release
def test_a_bisection_goes_on_with_submitit(bisected: Path) -> None:
    """The same without a cluster, by what starts jobs of Slurm."""
    pytest.importorskip("submitit", reason="needs the extra dtypedoctor[slurm]")
    copy, lost = interrupted(bisected, "on-slurm", 1)
    before = len(runs_of(copy))
    options = ["--allow-code", "--executor", "submitit-local", "--send", "network.py"]
    made = dtypedoctor("bisect", "--resume", copy.name, *options, cwd=copy.parent)
    assert made.code == 10, made.err
    assert answer(copy) == answer(bisected)
    assert runs_of(copy)[before:] == list(lost)


def test_a_cluster_that_is_not_there_is_said_at_once(project: Path) -> None:
    """One sentence, exit 2; what was begun can be resumed or is gone."""
    pytest.importorskip("ray", reason="needs the extra dtypedoctor[ray]")
    finished = dtypedoctor(
        "run", "scenarios", "--out", "out", "--executor", "ray", "--address", "nowhere.invalid:1", cwd=project
    )
    assert finished.code == 2, finished.err
    assert "cannot reach the Ray cluster nowhere.invalid:1" in finished.err
    assert "Traceback" not in finished.err
    assert not (project / "out").exists()


@pytest.fixture
def submitit(tmp_path: Path) -> Iterator[Executor]:
    """submitit's local executor."""
    pytest.importorskip("submitit", reason="needs the extra dtypedoctor[slurm]")
    with machines(Where(executor="submitit-local", jobs=2), tmp_path / "jobs", 600) as (executor, _):
        yield executor


@pytest.mark.release
def test_a_scenario_runs_as_a_job_of_submitit(project: Path) -> None:
    """With the files that it names; nothing that was sent stays behind."""
    pytest.importorskip("submitit", reason="needs the extra dtypedoctor[slurm]")
    finished = dtypedoctor(
        "run", "scenarios/own.yaml", "--out", "out", "--executor", "submitit-local", "--no-remedies", cwd=project,
    )  # fmt: skip
    assert finished.code == 0, finished.err
    assert "Sent to each machine: the scenario, dtypedoctor" in finished.err
    assert report_of(project / "out" / "own")["command"].startswith("dtypedoctor run scenarios/own.yaml")
    assert not list((project / "out" / "jobs").glob("**/*.pkl"))


@pytest.mark.release
def test_a_probe_runs_as_a_job_and_leaves_its_trace_here(
    submitit: Executor, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exit status and its standard error come home with it, and the request stays what was asked for."""
    monkeypatch.chdir(project)
    scenario = Scenario.model_validate(HEALTHY)
    request = Request(scenario=scenario)
    run = RemoteRun(submitit, request, project / "run", packed([scenario], Where(executor="ray")), print)
    assert until(lambda: run.wait(1.0))
    found = run.collect()
    assert found.trace.end is not None
    assert found.exit == WorkerExit(code=0, timed_out=False, seconds=found.exit.seconds)
    assert json.loads((project / "run" / "request.json").read_text()) == json.loads(request.model_dump_json())


@pytest.mark.release
def test_a_job_of_submitit_that_is_killed_is_submitted_again(
    submitit: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler that preempts it kills all of its processes; its second time it runs to its end."""
    core = pytest.importorskip("submitit.core.core")
    monkeypatch.setattr(core.Job, "_results_timeout_s", 1)  # that it waits for a shared folder to show a result
    begun = tmp_path / "begun"
    program = f"import os, time; p = {str(begun)!r}; n = os.path.exists(p); open(p, 'w').close(); n or time.sleep(1000)"
    job = Job(
        name="one", outlives=False, common={}, own={}, command=[PYTHON, "-c", program], environment={}, limit=600.0
    )
    said: list[str] = []
    submitted = SubmittedJob(submitit, job, said.append)
    until(begun.exists)
    end(controller_of(os.getpid()))
    assert until(lambda: submitted.wait(1.0))
    assert submitted.ended()["status"] == 0
    assert len(said) == 1
    assert "its machine was lost (UncompletedJobError" in said[0]


def controller_of(process: int) -> int:
    """submitit's process that runs a job for another one."""

    def found() -> int:
        for name in filter(str.isdecimal, os.listdir("/proc")):
            try:
                parent = int(Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[1])
                command = Path("/proc", name, "cmdline").read_bytes()
            except OSError:
                continue
            if parent == process and b"submitit.local._local" in command:
                return int(name)
        return 0

    return int(until(found))
