"""The ranks of a sharded model as forks of one process that has built it: what they say and how they end is what torchrun's processes do."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from command import Finished, dtypedoctor, forked, report_of
from patience import PATIENCE, becomes
from test_bisect_distributed import LLAMA, processes_with
from test_resident import records, runs_of

from dtypedoctor.runner.run import EXIT, WorkerExit
from dtypedoctor.trace.ranks import rank_directories

HERE = Path(__file__).parent
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}


def written(folder: Path, model: dict[str, Any], **more: Any) -> Path:
    """A scenario that trains a sharded model one step in two processes."""
    work = {"kind": "train", "steps": 1, "sequence_length": 8, "optimizer": "sgd", "learning_rate": 0.05}
    scenario = {
        "name": "sharded",
        "summary": "A tiny model.",
        "steps": [{"model": model, "workload": work}],
        "distributed": {"processes": 2, "strategy": "fsdp"},
    }
    path = folder / "sharded.yaml"
    path.write_text(json.dumps(scenario | more))
    return path


def diagnosed(folder: Path, model: dict[str, Any], *options: str, **more: Any) -> tuple[Finished, Path]:
    """The run of a scenario without fixes, and its directory."""
    folder.mkdir(exist_ok=True)
    path = written(folder, model, **more)
    out = folder / "run"
    arguments = ("run", path, "--no-remedies", "--allow-code", "--device", "cpu", *options, "--out", out)
    return dtypedoctor(*arguments, **ENVIRONMENT), out


def factory(name: str) -> dict[str, Any]:
    """The model that one of the factories makes."""
    return {"name": f"rank_factories:{name}", "dtype": "float32"}


def started(folder: Path, *options: str, **environment: str) -> "subprocess.Popen[str]":
    """A run in ``folder / "run"`` whose ranks have begun, and never end."""
    out = folder / "run"
    arguments = ["run", written(folder, factory("stuck")), "--allow-code", "--device", "cpu", *options, "--out", out]
    command = [sys.executable, "-m", "dtypedoctor", *map(str, arguments)]
    variables = os.environ | ENVIRONMENT | environment
    doctor = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert becomes(lambda: (out / "before" / "rank-1" / "events.jsonl").exists())
    return doctor


def comparable(directory: Path) -> list[str]:
    """The records of a trace, but for the memory that FSDP2 allocates and has not written yet when an operator gets it, and for our own frames."""
    found = []
    for line in records(directory):
        record = json.loads(line)
        if isinstance(record, dict):
            if record["e"] == "op":
                record.pop("inputs", None)
                record.pop("outputs", None)
            if record["e"] == "caught":
                record.pop("frames")
                record.pop("spans", None)
        found.append(json.dumps(record, sort_keys=True))
    return found


@pytest.mark.release
def test_forks_say_what_processes_of_torchrun_say(tmp_path: Path) -> None:
    """Each record of each rank in each run, and the findings."""
    forks, ours = diagnosed(tmp_path / "forks", LLAMA)
    processes, theirs = diagnosed(tmp_path / "processes", LLAMA, "--fresh-workers")
    assert forks.code == processes.code == 10, forks.err
    assert (ours / "server").is_dir()
    assert not (theirs / "server").exists()
    assert not list(ours.rglob("torchrun"))
    assert runs_of(ours).keys() == runs_of(theirs).keys()
    for name, directory in runs_of(ours).items():
        assert comparable(directory) == comparable(runs_of(theirs)[name]), name
    found = [[(one["id"], one["fqn"], one["op"], one["confidence"]) for one in report_of(out)["findings"]]
             for out in (ours, theirs)]  # fmt: skip
    assert found[0] == found[1]
    assert found[0]


@pytest.mark.release
@pytest.mark.parametrize(
    ("name", "code", "words"),
    [("killed", -signal.SIGKILL, "was killed by SIGKILL"), ("raising", 1, "no room on rank 1")],
)
def test_a_rank_that_fails_ends_the_others(name: str, code: int, words: str, tmp_path: Path) -> None:
    """The report is about the rank that failed, and the other one, which waited for it, was ended."""
    finished, out = diagnosed(tmp_path, factory(name))
    assert finished.code in {1, 10}, finished.err
    assert words in " ".join(finished.out.split())
    assert (out / "before" / "leading").resolve().name == "rank-1"
    statuses = [
        WorkerExit(**json.loads((place / EXIT).read_text())) for place in rank_directories(out / "before").values()
    ]
    assert statuses[1].code == code
    assert not statuses[1].ended_by_launcher
    assert statuses[0].code
    assert becomes(lambda: not processes_with(out))


@pytest.mark.release
@pytest.mark.parametrize(("name", "code"), [("terminated", -signal.SIGTERM), ("gone", 0)])
def test_a_rank_that_ends_without_a_word_is_told_of_as_what_it_is(name: str, code: int, tmp_path: Path) -> None:
    """It was not ended by anybody's launcher."""
    finished, out = diagnosed(tmp_path, factory(name))
    assert finished.code == 10, finished.err
    ended = json.loads((out / "before" / "rank-1" / EXIT).read_text())
    assert (ended["code"], ended.get("ended_by_launcher", 0)) == (code, 0)


@pytest.mark.release
def test_a_job_that_takes_too_long_is_ended_whole(tmp_path: Path) -> None:
    """One rank never returns, and the other one waits for it."""
    finished, out = diagnosed(tmp_path, factory("stuck"), time_limit=6)
    assert "time limit" in " ".join(finished.out.split()), finished.err
    ended = [json.loads((place / EXIT).read_text()) for place in rank_directories(out / "before").values()]
    assert [one["timed_out"] for one in ended] == [True, True]
    assert becomes(lambda: not processes_with(out))


@pytest.mark.release
def test_a_second_stage_has_a_group_of_its_own(tmp_path: Path) -> None:
    """Of a scenario with two, each with a model: the second one is run, and its failure found."""
    small = {"name": "builtin:llama-tiny", "dtype": "float32", "options": {"hidden": 32, "intermediate": 64}}
    work = {"kind": "forward", "sequence_length": 8}
    finished, out = diagnosed(
        tmp_path, LLAMA, steps=[{"model": one, "workload": work} for one in (small, small, LLAMA)]
    )
    assert finished.code == 10, finished.err
    first = report_of(out)["findings"][0]
    assert (first["id"], first["fqn"]) == ("float16-overflow", "model.layers.1.mlp")
    assert "stopped at its time limit" not in finished.out


@pytest.mark.release
def test_a_step_that_would_go_on_with_a_sharded_model_is_rejected(tmp_path: Path) -> None:
    """The group that has sharded it is gone by then."""
    work = {"kind": "forward", "sequence_length": 8}
    finished, _ = diagnosed(tmp_path, LLAMA, steps=[{"model": LLAMA, "workload": work}, {"workload": work}])
    assert finished.code == 2
    assert "give it a `model`" in " ".join(finished.err.split())


@pytest.mark.release
def test_what_a_rank_has_started_ends_with_it(tmp_path: Path) -> None:
    """Exit handlers, which would end a daemon of multiprocessing, are not run."""
    finished, out = diagnosed(tmp_path, factory("accompanied"))
    assert finished.code == 0, finished.err
    assert becomes(lambda: not processes_with(out))


@pytest.mark.release
@pytest.mark.parametrize("how", ["--resident-workers", "--fresh-workers"])
def test_a_run_of_ranks_that_is_asked_to_end_ends(how: str, tmp_path: Path) -> None:
    """With one line, and nothing of it goes on or is left in the folder for temporary files."""
    out, place = tmp_path / "run", Path(tempfile.mkdtemp())  # a socket in it has to have a short path
    doctor = started(tmp_path, how, TMPDIR=str(place))
    doctor.terminate()
    _, said = doctor.communicate(timeout=PATIENCE)
    assert doctor.returncode == 130
    assert said.splitlines()[-1].startswith("error: interrupted")
    assert becomes(lambda: not processes_with(out))
    assert not list(place.glob("dtypedoctor-*"))
    shutil.rmtree(place)


def test_a_folder_for_temporary_files_with_a_long_path_is_rejected(tmp_path: Path) -> None:
    """Workers are asked for by a socket in it, whose path has at most 107 characters."""
    place = tmp_path / ("long" * 25)
    place.mkdir()
    path = written(tmp_path, LLAMA)
    finished = dtypedoctor("run", path, "--device", "cpu", "--out", tmp_path / "run", **ENVIRONMENT, TMPDIR=str(place))
    assert finished.code == 2, finished.err
    assert "Set TMPDIR to a folder with a shorter path." in finished.err


@pytest.mark.release
def test_no_rank_outlives_the_doctor(tmp_path: Path) -> None:
    """It is killed, so that it cannot say anything to anybody."""
    out = tmp_path / "run"
    doctor = started(tmp_path)
    assert len(processes_with(out)) >= 2
    doctor.kill()
    doctor.communicate(timeout=PATIENCE)
    assert becomes(lambda: not processes_with(out))


@pytest.mark.release
def test_a_factory_makes_the_model_of_each_rank(tmp_path: Path) -> None:
    """It may make another one on each, so it is not called before there are ranks."""
    finished, out = diagnosed(tmp_path, factory("by_rank"))
    assert (out / "server").is_dir()
    assert "the weights of rank 1 are not here" in " ".join((finished.out + finished.err).split())


@pytest.mark.release
def test_meetings_leave_nothing(tmp_path: Path) -> None:
    """The file in which ranks meet is gone after each run, whatever the folder is called."""
    place = Path(tempfile.mkdtemp(suffix=" #1 %20 ?é"))
    path = written(tmp_path, factory("raising"))
    arguments = ("run", path, "--no-remedies", "--allow-code", "--device", "cpu", "--out", tmp_path / "run")
    finished = forked(*arguments, **ENVIRONMENT, TMPDIR=str(place))
    assert "no room on rank 1" in " ".join(finished.out.split()), finished.err
    assert not list(place.glob("dtypedoctor-ranks-*"))
    shutil.rmtree(place)
