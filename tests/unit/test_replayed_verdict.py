"""What a capsule is replayed as, and whether the replay comes to what was found in the run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_safetensors
from report_builders import mismatch, overflow

from dtypedoctor.diagnosis.rule import Severity
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.capsules import _without_secrets, is_replay, same_verdict
from dtypedoctor.lab.cli.replay import scenario_of
from dtypedoctor.replay.capsule import Capsule


def capsule(finding: str = "float16-overflow", op: str | None = "aten.mul.Tensor", **more: Any) -> Capsule:
    """A capsule of ``mlp`` whose call was made in a bfloat16 region."""
    call = {"autocast": [["cpu", "bfloat16"]], "args": [], "kwargs": {}}
    described = {
        "fqn": "mlp",
        "class": "Gated",
        "call": call,
        "module": {},
        "drawn": {},
        "finding": {"id": finding, "op": op},
    }
    return Capsule(directory=Path("runs/x/capsule"), description=described | more, bytes=10)


def test_a_replay_is_a_scenario_of_one_call_in_the_same_region(tmp_path: Path) -> None:
    """It is told by its model, and offers bfloat16 once beside what is proposed."""
    write_safetensors(tmp_path / "capsule.safetensors", {"weight.a": ("F16", [2], None), "input.0": ("F32", [4], None)})
    kept = replace(capsule(), directory=tmp_path)
    scenario = scenario_of(kept, ["bfloat16", "float32"])
    step = scenario.steps[0]
    assert is_replay(scenario.model_dump())
    assert step.model is not None
    assert (step.model.name, step.model.dtype) == (f"capsule:{tmp_path}", "float16")
    assert step.autocast is not None
    assert step.autocast.dtype == "bfloat16"
    assert scenario.remedies == ["bfloat16", "float32"]
    assert scenario.summary == "The failing call of mlp."
    assert scenario_of(replace(capsule(fqn=""), directory=tmp_path), []).summary == "The failing call of Gated."


def test_the_same_finding_at_the_same_operator_is_the_same_verdict() -> None:
    """Notes beside it do not count."""
    found = replace(overflow().findings[0], id="float16-overflow", op="aten.mul.Tensor")
    note = replace(found, id="update-stall", severity=Severity.INFO)
    assert same_verdict(capsule(), [note, found]) == "Same verdict as in the run: float16-overflow, aten.mul.Tensor."
    without = replace(found, op=None)
    assert same_verdict(capsule(op=None), [without]) == "Same verdict as in the run: float16-overflow."
    assert same_verdict(capsule(), [note]) == "The replay does not fail; the run failed with float16-overflow."
    assert same_verdict(capsule(), [without]) == (
        "Another verdict than in the run: float16-overflow, no operator known; in the run float16-overflow, aten.mul.Tensor."
    )


def test_operands_of_a_replayed_operator_are_inputs() -> None:
    """So a mismatch among them has the name there that it has for inputs of a model."""
    found = replace(mismatch().findings[0], id="model-input-dtype", op="aten.mm.default")
    kept = capsule("operand-dtype-mismatch", "aten.mm.default", operator={"op": "aten.mm.default"})
    assert same_verdict(kept, [found]).startswith("Same verdict")
    assert same_verdict(replace(kept, description=capsule().description), [found]).startswith("Another verdict")


def test_carried_source_without_its_secrets_is_still_a_program() -> None:
    """A name that looks like one stays; a text is masked; what is no program before is refused."""
    source = "token = 1\nkey = 'hf_abcdefghijklmnopqrstuvwxyzABCDEFGH'\n"
    masked = _without_secrets(source)
    assert "hf_abcdef" not in masked
    compile(masked, "source", "exec")
    with pytest.raises(UsageError, match="no program"):
        _without_secrets("class (")
