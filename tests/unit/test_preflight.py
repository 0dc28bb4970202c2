"""Static checks of what a scenario or a script names."""

from pathlib import Path

import pytest
from checkpoints import write_checkpoint

from dtypedoctor.diagnosis.checkpoint import cached
from dtypedoctor.diagnosis.rule import Confidence, Finding, Severity
from dtypedoctor.examination.examine import joined, stand_out
from dtypedoctor.lab.scenarios.model import Scenario
from dtypedoctor.lab.trials.treatment import checkpoints_of


def scenario(step: dict[str, object]) -> Scenario:
    return Scenario.model_validate({"name": "case", "summary": "A case.", "steps": [step]})


def finding(name: str, severity: Severity = Severity.ERROR) -> Finding:
    return Finding(id=name, severity=severity, confidence=Confidence.LIKELY, summary="", cause="")


def test_a_local_model_is_checked_as_it_will_be_loaded(tmp_path: Path) -> None:
    """The scenario's dtype counts, and its gradient scaler."""
    folder = write_checkpoint(tmp_path / "model", "BF16")
    step = {"model": {"name": str(folder), "dtype": "float16"}, "workload": {"kind": "train"}, "grad_scaler": True}
    ids = [f.id for f in stand_out(checkpoints_of(scenario(step)))]
    assert ids == ["unscale-float16-gradients", "checkpoint-dtype-mismatch"]


def test_a_scripts_arguments_are_searched_for_checkpoints(tmp_path: Path) -> None:
    """As an argument of its own or behind an equals sign; mere information is left out."""
    odd = write_checkpoint(tmp_path / "odd", "BF16", config={"dtype": "float16"})
    fine = write_checkpoint(tmp_path / "fine", "BF16", config={"text_config": {"dtype": "float32"}})
    for arguments in (["--model", str(odd)], [f"--model={odd}"]):
        workload = {"kind": "script", "path": "train.py", "args": arguments}
        assert [f.id for f in stand_out(checkpoints_of(scenario({"workload": workload})))] == [
            "checkpoint-dtype-mismatch"
        ]
    workload = {"kind": "script", "path": "train.py", "args": [str(fine), "3", "", "a" * 5000, "\0"]}
    assert stand_out(checkpoints_of(scenario({"workload": workload}))) == ()


def test_a_checkpoint_that_cannot_be_read_is_left_to_the_run(tmp_path: Path) -> None:
    """The run itself will say what is wrong with it."""
    folder = write_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"cut")
    assert (
        stand_out(checkpoints_of(scenario({"workload": {"kind": "script", "path": "x.py", "args": [str(folder)]}})))
        == ()
    )


def test_what_a_run_showed_stands_before_what_its_files_say() -> None:
    """Errors first, static findings next, the rest last; nothing twice."""
    dynamic = (finding("a"), finding("b", Severity.WARNING))
    static = (finding("a", Severity.WARNING), finding("c", Severity.WARNING))
    assert [f.id for f in joined(dynamic, static)] == ["a", "c", "b"]
    assert joined(dynamic, static)[0] is dynamic[0]


def test_a_model_is_found_in_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot of main, without main the newest one, None for a stranger."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = tmp_path / "models--org--name"
    for snapshot in ("one", "two"):
        (model / "snapshots" / snapshot).mkdir(parents=True)
    assert cached("org/other") is None
    assert cached("long" * 100) is None
    assert cached("org/name") is not None
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("one\n")
    assert cached("org/name") == model / "snapshots" / "one"
