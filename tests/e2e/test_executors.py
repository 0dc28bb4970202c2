"""Scenarios on a real Ray cluster of two nodes and on submitit's executor, also where a machine is killed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import dtypedoctor, report_of
from patience import PATIENCE, becomes

from dtypedoctor.guardian import end

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
    return LanguageModel()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a scenario and the model that it names."""
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "own.yaml").write_text(json.dumps(HEALTHY))
    (tmp_path / "network.py").write_text(NETWORK)
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
            command = Path("/proc", name, "cmdline").read_bytes()
            commands[int(name)] = command.replace(b"\0", b" ").decode(errors="replace")
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
    return int(node.all_processes["raylet"][0].process.pid)


@pytest.mark.release
def test_a_scenario_whose_node_is_killed_runs_on_the_other_one(cluster: Any, project: Path) -> None:
    """The report is complete; ``--resume`` then finds nothing left to do."""
    one, nodes = cluster
    command = [sys.executable, "-m", "dtypedoctor", "run", "scenarios", "--out", "out", "--no-remedies"]
    with (project / "err").open("wb") as err:
        started = subprocess.Popen(
            [*command, "--executor", "ray"], cwd=project, stdout=subprocess.PIPE, stderr=err,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_ADDRESS": one.address},
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
    again = dtypedoctor("run", "--resume", "out", cwd=project)
    assert (again.code, "1 of 1 scenario as expected" in again.out) == (0, True)
    assert "1/1" not in again.err


def test_a_cluster_that_is_not_there_is_said_at_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, exit 2; what was begun can be resumed or is gone."""
    pytest.importorskip("ray", reason="needs the extra dtypedoctor[ray]")
    monkeypatch.setenv("RAY_ADDRESS", "nowhere.invalid:1")
    finished = dtypedoctor("run", "scenarios", "--out", "out", "--executor", "ray", cwd=project)
    assert finished.code == 2, finished.err
    assert "cannot reach the Ray cluster nowhere.invalid:1" in finished.err
    assert "Traceback" not in finished.err
    assert not (project / "out").exists()


@pytest.mark.release
def test_a_scenario_runs_as_a_job_of_submitit(project: Path) -> None:
    """Its report is that of a run here, and only submitit's own logs stay behind."""
    pytest.importorskip("submitit", reason="needs the extra dtypedoctor[slurm]")
    finished = dtypedoctor(
        "run", "scenarios/own.yaml", "--out", "out", "--executor", "submitit-local", "--no-remedies", cwd=project,
    )  # fmt: skip
    assert finished.code == 0, finished.err
    assert report_of(project / "out" / "own")["command"].startswith("dtypedoctor run scenarios/own.yaml")
    assert not (project / "out" / "jobs" / "own").exists()
