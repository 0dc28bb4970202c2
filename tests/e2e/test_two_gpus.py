"""A model on two devices: spread over both by one process (`device_map: auto`), or sharded by FSDP2 over NCCL."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import dtypedoctor, report_of
from test_forked_ranks import comparable
from test_resident import IN_PLACE, MODEL, runs_of

from dtypedoctor.trace.reader import read_trace

TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
CULPRITS = ["model.layers.2.mlp.down_proj", "model.layers.2.mlp::self"]
ON_CUDA = CULPRITS[1:]
"""There products are summed up in float32, so that the projection need not be kept as well."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose MLP in layer 2 overflows float16, as a folder."""
    place = tmp_path_factory.mktemp("model") / "llama"
    subprocess.run([sys.executable, "-c", MODEL, str(place)], check=True, capture_output=True)
    return place


@TWO
@pytest.mark.gpu
@pytest.mark.parametrize("workers", ["--resident-workers", "--fresh-workers"])
def test_a_model_that_is_spread_over_devices_is_bisected(llama: Path, workers: str, tmp_path: Path) -> None:
    """Layer 2 lies on the second device; what is kept in float32 stays where it is."""
    out = tmp_path / "run"
    arguments = ["--model", llama, "--dtype", "float16", "--workload", "forward", "--device-map", "auto"]
    finished = dtypedoctor("bisect", *arguments, "--device", "cuda", workers, "--out", out)
    assert finished.code == 10, finished.err
    found = report_of(out)["bisection"]
    assert sorted(found["culprits"]) == ON_CUDA
    assert found["confirmed"]
    assert {row["outcome"] for row in found["verdicts"] if row["mode"] == "float32 throughout"} == {"pass"}
    recorded = map(json.loads, (out / "before" / "events.jsonl").read_text().splitlines())
    environment = next(record for record in recorded if record["e"] == "environment")
    assert environment["values"]["gpu"]["count"] == 2


@TWO
@pytest.mark.gpu
def test_a_model_that_is_spread_over_devices_is_run_and_fixed(llama: Path, tmp_path: Path) -> None:
    """The origin is found on the second device, and a fix is proven there."""
    scenario = {
        "name": "spread",
        "summary": "A small Llama on two devices.",
        "steps": [
            {
                "model": {"name": str(llama), "dtype": "float16", "device_map": "auto"},
                "workload": {"kind": "train", "steps": 2, "sequence_length": 8},
            }
        ],
        "reference": {"dtype": "bfloat16"},
    }
    (tmp_path / "spread.yaml").write_text(json.dumps(scenario))
    finished = dtypedoctor("run", tmp_path / "spread.yaml", "--device", "cuda", "--out", tmp_path / "run")
    report = report_of(tmp_path / "run")
    first = report["findings"][0]
    assert (first["id"], first["fqn"]) == ("float16-overflow", "model.layers.2.mlp"), finished.out
    assert first["confidence"] == "proven"


@TWO
@pytest.mark.gpu
def test_a_sharded_model_is_bisected_over_nccl(llama: Path, tmp_path: Path) -> None:
    """Each rank moves one unit after the other to its device; the modules kept in float32 are units of their own.

    Each rank has other tokens, and those of one need the projection kept as well.
    """
    out = tmp_path / "run"
    arguments = ["--model", llama, "--dtype", "float16", "--workload", "forward", "--nproc-per-node", "2"]
    finished = dtypedoctor("bisect", *arguments, "--device", "cuda", "--out", out, OMP_NUM_THREADS="1")
    assert finished.code == 10, finished.err
    found = report_of(out)["bisection"]
    assert sorted(found["culprits"]) == CULPRITS
    assert found["confirmed"]
    kept = read_trace(out / "remedy-keep-float32" / "rank-1")
    gathered = {site.dtype for site in kept.sites.values() if (site.kind, site.cls) == ("sent", "all_gather")}
    assert gathered == {"float16", "float32"}


def unnumbered(directory: Path) -> list[str]:
    """The records of a trace without their numbers, in no order: when a device's results arrive, and are written between them, depends on time."""
    found = [json.loads(line) for line in comparable(directory)]
    return sorted(json.dumps(one | {"n": 0}, sort_keys=True) for one in found if isinstance(one, dict))


@TWO
@pytest.mark.gpu
def test_forked_ranks_say_over_nccl_what_those_of_torchrun_say(llama: Path, tmp_path: Path) -> None:
    """Of a training with an optimizer, each record of each rank in each run."""
    scenario = {
        "name": "sharded",
        "summary": "A small Llama on two devices.",
        "distributed": {"processes": 2, "strategy": "fsdp", "param_dtype": "bfloat16"},
        "steps": [
            {
                "model": {"name": str(llama), "dtype": "float32"},
                "workload": {"kind": "train", "steps": 2, "sequence_length": 8},
            }
        ],
    }
    (tmp_path / "sharded.yaml").write_text(json.dumps(scenario))
    codes = [
        dtypedoctor(
            "run", tmp_path / "sharded.yaml", "--no-remedies", "--device", "cuda", how, "--out", tmp_path / how[2:]
        ).code
        for how in ("--resident-workers", "--fresh-workers")
    ]
    assert codes[0] == codes[1] == 0
    forks, processes = runs_of(tmp_path / "resident-workers"), runs_of(tmp_path / "fresh-workers")
    assert len(forks) >= 4
    assert forks.keys() == processes.keys()
    for name, directory in forks.items():
        ours, theirs = unnumbered(directory), unnumbered(processes[name])
        assert [one for one in ours if one not in theirs][:3] == [one for one in theirs if one not in ours][:3], name


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, IN_PLACE], ids=["forked", "in place"])
def test_a_map_of_devices_changes_nothing_on_a_cpu(llama: Path, variables: dict[str, str], tmp_path: Path) -> None:
    """There is one device of that kind."""
    out = tmp_path / "run"
    arguments = ["--model", llama, "--dtype", "float16", "--workload", "forward", "--device-map", "auto"]
    finished = dtypedoctor("bisect", *arguments, "--device", "cpu", "--out", out, **variables)
    assert finished.code == 10, finished.err
    assert sorted(report_of(out)["bisection"]["culprits"]) == CULPRITS


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device-map", "balanced"], "--device-map: "),
        (["--device-map", "auto", "--nproc-per-node", "2"], "a device_map is for one process"),
        (["--workload", "generate", "--nproc-per-node", "2"], "--nproc-per-node: "),
    ],
)
def test_what_does_not_go_together_is_rejected(llama: Path, arguments: list[str], message: str, tmp_path: Path) -> None:
    """Before anything is run."""
    finished = dtypedoctor("bisect", "--model", llama, *arguments, "--out", tmp_path / "run")
    assert finished.code == 2
    assert message in finished.err
    assert not (tmp_path / "run").exists()
