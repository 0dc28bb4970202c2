"""What goes wrong before and during a run ends with one clear message and the right exit code."""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Finished, in_this_process, report_of
from patience import late_with

GRPO: dict[str, Any] = {"kind": "grpo", "steps": 8, "learning_rate": 0.05, "gradient_accumulation": 4}
LORA: dict[str, Any] = {
    "r": 4,
    "alpha": 8,
    "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


def scenario(directory: Path, *, name: str = "case", **changes: Any) -> Path:
    """Writes a small GRPO scenario with some top-level keys or model keys changed."""
    model = {"name": "builtin:gemma4-tiny", "dtype": "float16", "lora": LORA} | changes.pop("model", {})
    content = {
        "name": name,
        "summary": "A case.",
        "steps": [{"model": model, "workload": GRPO | changes.pop("workload", {})}],
    }
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content | changes))
    return path


def run(path: Path, *more: str, out: Path | None = None) -> tuple[Finished, Path]:
    """Runs a scenario file; the factories of the tests can be imported."""
    directory = out or path.parent / "run"
    return in_this_process("run", path, "--allow-code", "--out", directory, *more), directory


def assert_refused(finished: Finished, directory: Path, *words: str) -> None:
    """Exit 2, the words in one message on stderr, no traceback, nothing left behind."""
    assert finished.code == 2, finished.err
    assert "Traceback" not in finished.err
    for word in words:
        assert word in finished.err
    assert not directory.exists()


def test_an_unknown_key_is_named_with_its_place(tmp_path: Path) -> None:
    """file:line:column, the key, and the one that was meant."""
    path = scenario(tmp_path)
    path.write_text(path.read_text().replace("learning_rate", "lerning_rate"))
    finished, directory = run(path)
    assert_refused(finished, directory, "case.yaml:", "lerning_rate", "learning_rate")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("factories:raises", ("factories:raises raised LookupError: the weights are in another castle",)),
        ("factories:not_a_model", ("returned str, not a torch.nn.Module",)),
        ("factories:nowhere", ("cannot find the model factory factories:nowhere",)),
    ],
)
def test_a_model_that_cannot_be_had_is_refused(model: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """Factories that raise, return something else or do not exist."""
    finished, directory = run(scenario(tmp_path, model={"name": model}))
    assert_refused(finished, directory, *words)


def test_an_output_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    """A file stands where the run directory's parent should be."""
    (tmp_path / "file").write_text("")
    finished, directory = run(scenario(tmp_path), out=tmp_path / "file" / "run")
    assert_refused(finished, directory, "cannot be created")


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("factory", "words"), [("killed", "SIGKILL"), ("crashes", "SIGSEGV"), ("hangs", "time limit")])
def test_a_worker_that_dies_leaves_a_report_that_names_the_last_module(
    factory: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, crashed or hung in the second MLP: the report says how and where, and the doctor is alive."""
    note = tmp_path / "hangs"
    monkeypatch.setattr(time, "monotonic", late_with(note))
    options = {"note": str(note)} if factory == "hangs" else {}
    path = scenario(tmp_path, model={"name": f"factories:{factory}", "options": options, "lora": None}, time_limit=1000)
    finished, directory = run(path)
    assert finished.code == 10, finished.err
    assert "Traceback" not in finished.err
    report = report_of(directory)
    assert report["status"] == "worker-died"
    assert words in report["headline"]
    assert "model.layers.1.mlp" in report["headline"]


@pytest.mark.release
def test_a_correction_whose_target_does_not_match_is_not_tried_and_says_why(tmp_path: Path) -> None:
    """The correction raises in the worker; the table shows not-tried with the difference of the signatures."""
    model = {"name": "factories:renamed_mlp_input", "dtype": "float16"}
    step = {"model": model, "workload": {"kind": "forward"}}
    path = scenario(tmp_path, steps=[step], remedies=["gemma4-mlp-float32-product"])
    finished, directory = run(path)
    assert finished.code == 10, finished.err
    trials = {t["remedy"]: t for t in report_of(directory)["trials"]}
    trial = trials["gemma4-mlp-float32-product"]
    assert trial["outcome"] == "not-tried"
    assert "takes (self, hidden), this correction was written for (self, x)" in trial["reason"]
