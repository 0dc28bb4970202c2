"""`dtypedoctor bisect` of scenarios of several processes: real torchrun, two ranks over gloo, each probe a job."""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import nursery
import pytest
from command import Finished, forked, in_this_process, report_of
from patience import becomes
from test_bisect import assert_reproduction_fails_as_it_says, lines_of

from dtypedoctor.trace.ranks import rank_directories
from dtypedoctor.trace.reader import read_trace

pytestmark = pytest.mark.release

HERE = Path(__file__).parent
SCALES = {"gate_proj": 3000, "up_proj": 3000, "down_proj": 0.0001}
LLAMA = {
    "name": "builtin:llama-tiny",
    "dtype": "float16",
    "options": {"hidden": 32, "intermediate": 64},
    "outliers": [{"parameters": f"model.layers.1.mlp.{one}.weight", "scale": by} for one, by in SCALES.items()],
}
OVERFLOWING = ["model.layers.1.mlp.down_proj", "model.layers.1.mlp::self"]
"""The product in the MLP of the second layer is inf in float16, and the projection of it needs more than float16's largest number."""


@pytest.fixture(scope="module", autouse=True)
def libraries_are_imported_once() -> None:
    """Launchers and ranks are forked from a process that has them."""
    nursery.preload(frozenset({"torch.distributed.run", "torch.distributed.fsdp"}))


def factory(name: str, dtype: str = "float16") -> dict[str, Any]:
    """The model that one of the tests' factories makes."""
    return {"name": f"bisect_factories:{name}", "dtype": dtype}


def written(folder: Path, model: dict[str, Any], distributed: dict[str, str]) -> Path:
    """A scenario that trains a model one step; in two processes if anything is said of them."""
    work = {"kind": "train", "steps": 1, "sequence_length": 8, "optimizer": "sgd", "learning_rate": 0.05}
    scenario = {"name": "sharded", "summary": "A tiny model.", "steps": [{"model": model, "workload": work}]}
    path = folder / "sharded.yaml"
    path.write_text(json.dumps(scenario | ({"distributed": {"processes": 2, **distributed}} if distributed else {})))
    return path


def bisect(*arguments: str | Path) -> Finished:
    """`dtypedoctor bisect` by forks; ranks find the factories."""
    path = os.pathsep.join([str(HERE), *sys.path])
    return forked("bisect", *arguments, "--allow-code", PYTHONPATH=path, OMP_NUM_THREADS="1")


def bisected(folder: Path, model: dict[str, Any], **distributed: str) -> tuple[Finished, Path]:
    """The bisection of a scenario and its directory."""
    folder.mkdir(exist_ok=True)
    return bisect(written(folder, model, distributed), "--out", folder / "run"), folder / "run"


def processes_with(directory: Path) -> list[int]:
    """The processes that have a file below ``directory`` open: the ranks of a probe and their launcher."""
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):
        try:
            opened = [os.readlink(link) for link in Path("/proc", process, "fd").iterdir()]
        except OSError:  # it has ended in the meantime
            continue
        if any(path.startswith(f"{directory}/") for path in opened):
            found.append(int(process))
    return found


def test_an_interrupted_bisection_of_a_sharded_model_goes_on_to_the_answer_of_one_process(tmp_path: Path) -> None:
    """SIGTERM in the middle leaves an answer so far and no process; --resume repeats no run, and the units of kept modules are float32."""
    out = tmp_path / "sharded" / "run"

    def interrupt() -> None:
        log = out / "bisection.jsonl"
        if becomes(lambda: log.exists() and len(lines_of(out, "probe")) >= 3 and processes_with(out)):
            os.kill(nursery._last.pid, signal.SIGTERM)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    interrupted, _ = bisected(out.parent, LLAMA, strategy="fsdp")
    interrupting.join()
    assert interrupted.code == 10, interrupted.err
    assert "Traceback" not in interrupted.err
    assert report_of(out)["bisection"]["end"] == "interrupted"
    assert f"dtypedoctor bisect --resume {out}" in " ".join(interrupted.out.split())
    assert becomes(lambda: not processes_with(out))

    before = {entry["place"] for entry in lines_of(out, "run")}
    resumed = bisect("--resume", out)
    assert resumed.code == 10, resumed.err
    places = [entry["place"] for entry in lines_of(out, "run")]
    assert before < set(places)
    assert len(places) == len(set(places)), "a run was made twice"
    found = report_of(out)["bisection"]
    assert sorted(found["culprits"]) == OVERFLOWING
    assert found["one_minimal"]
    assert found["confirmed"]
    assert {row["outcome"] for row in found["verdicts"] if row["mode"] == "culprits in float32"} == {"pass"}
    assert not any("compiled" in row["mode"] for row in found["verdicts"])
    assert "elements are inf or NaN in torch.float16" in found["reproduction"]["said"]
    assert not list(out.rglob("*.kept-*"))
    kept = [read_trace(place) for place in rank_directories(out / "remedy-keep-float32").values()]
    assert len(kept) == 2
    for trace in kept:
        gathered = {site.dtype for site in trace.sites.values() if (site.kind, site.cls) == ("sent", "all_gather")}
        assert gathered == {"float16", "float32"}

    alone, single = bisected(tmp_path / "alone", LLAMA)
    assert alone.code == 10, alone.err
    assert sorted(report_of(single)["bisection"]["culprits"]) == OVERFLOWING


def test_a_policy_of_shards_is_bisected_with_float32_weights(tmp_path: Path) -> None:
    """The reference computes in float32, the culprit gets a unit of its own, and a script shows it in one process."""
    finished, out = bisected(tmp_path, factory("one", "float32"), strategy="fsdp", param_dtype="float16")
    assert finished.code == 10, finished.err
    found = report_of(out)["bisection"]
    assert found["culprits"] == ["blocks.1::self"]
    assert found["confirmed"]
    outcomes = {row["mode"]: row["outcome"] for row in found["verdicts"]}
    assert (outcomes["float32 throughout"], outcomes["param_dtype bfloat16"]) == ("pass", "pass")
    assert_reproduction_fails_as_it_says(out, tmp_path / "elsewhere")


def test_what_fails_on_one_rank_alone_is_the_failure_of_the_job(tmp_path: Path) -> None:
    """Under DistributedDataParallel: rank 0 is healthy until gradients are reduced, and has the same modules kept."""
    finished, out = bisected(tmp_path, factory("one_of_rank_1"), strategy="ddp")
    assert finished.code == 10, finished.err
    found = report_of(out)["bisection"]
    assert found["culprits"] == ["blocks.1::self"]
    assert found["confirmed"]
    assert (out / "before" / "leading").resolve().name == "rank-1"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_healthy_job_ends_as_a_healthy_process_does(tmp_path: Path, strategy: str) -> None:
    """Losses of each rank, which has batches of its own, are compared with those of the same rank."""
    finished, out = bisected(tmp_path, factory("healthy"), strategy=strategy)
    assert finished.code == 0, finished.out
    assert "No failure: everything is finite" in " ".join(finished.out.split())
    assert report_of(out)["bisection"]["end"] == "healthy"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--jobs", "2"], "--jobs 2: a probe has 2 processes, and one probe runs at a time"),
        (["--executor", "submitit-local"], "--executor submitit-local cannot start the 2 processes of a probe"),
    ],
)
def test_what_has_no_room_for_a_job_is_rejected(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Before anything runs, and no directory is left behind; when resumed, too."""
    path = written(tmp_path, LLAMA, {"strategy": "fsdp"})
    finished = in_this_process("bisect", path, "--out", tmp_path / "run", "--allow-code", *arguments)
    assert finished.code == 2
    assert message in finished.err
    assert not (tmp_path / "run").exists()
