"""A model on two devices, over which one process spreads it (`device_map: auto`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import dtypedoctor, in_this_process, report_of
from test_resident import MODEL

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
def test_a_model_that_is_spread_over_devices_is_bisected(llama: Path, tmp_path: Path) -> None:
    """Layer 2 lies on the second device; what is kept in float32 stays where it is."""
    out = tmp_path / "run"
    arguments = ["--model", llama, "--dtype", "float16", "--workload", "forward", "--device-map", "auto"]
    finished = dtypedoctor("bisect", *arguments, "--device", "cuda", "--out", out)
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


def test_an_unknown_map_of_devices_is_rejected(tmp_path: Path) -> None:
    """Before anything is run."""
    finished = in_this_process(
        "bisect", "--model", "builtin:llama-tiny", "--device-map", "balanced", "--out", tmp_path / "run"
    )
    assert finished.code == 2
    assert "--device-map: " in finished.err
    assert not (tmp_path / "run").exists()
