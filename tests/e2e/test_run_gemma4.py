"""From a scenario file to a proven cure, through the real command line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command import Finished, dtypedoctor, report_of

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


@pytest.fixture(scope="module")
def cured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """One whole run of the Gemma-4 scenario."""
    directory = tmp_path_factory.mktemp("gemma4") / "run"
    return dtypedoctor("run", SCENARIOS / "gemma4_grpo_fp16.yaml", "--out", directory), directory


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """A second run with the same seed that stops after the diagnosis."""
    directory = tmp_path_factory.mktemp("gemma4") / "again"
    return dtypedoctor("run", "gemma4_grpo_fp16", "--no-remedies", "--out", directory), directory


def test_it_fails_as_it_says_and_is_cured_as_it_says(cured: tuple[Finished, Path]) -> None:
    """Exit 0, no traceback, and the before/after table on stdout."""
    finished, _ = cured
    assert finished.code == 0, finished.err
    assert "Traceback" not in finished.err
    assert "Baseline and fixes" in finished.out
    assert "gemma4-mlp-float32-product" in finished.out
    assert "\x1b[" not in finished.out


def test_the_product_in_the_first_mlp_is_blamed_with_proof(cured: tuple[Finished, Path]) -> None:
    """id, module, op, phase, step, source line, operands and the float32 replay are those of the ticket."""
    finding = report_of(cured[1])["findings"][0]
    assert finding["id"] == "float16-overflow"
    assert finding["fqn"].endswith("layers.0.mlp")
    assert finding["op"] == "aten.mul.Tensor"
    assert (finding["phase"], finding["step"]) == ("generate", 2)
    assert re.fullmatch(r"transformers/models/gemma4/modeling_gemma4\.py:\d+", finding["source"])
    assert finding["confidence"] == "proven"
    evidence = " ".join(finding["evidence"])
    assert "65,504" in evidence
    assert "float32 is finite" in evidence


def test_both_remedies_cure_and_their_costs_and_parity_are_stated(cured: tuple[Finished, Path]) -> None:
    """Eight steps each, finite numbers, clamped elements counted, parity against the bfloat16 reference."""
    report = report_of(cured[1])
    trials = {t["remedy"]: t for t in report["trials"]}
    assert list(trials) == ["gemma4-mlp-float32-product", "bfloat16"]
    for trial in trials.values():
        assert trial["outcome"] == "fixed"
        assert trial["steps_completed"] == 8
        assert len(trial["loss"]) == 8
        assert all(value is not None for value in trial["loss"] + trial["grad_norm"])
        assert trial["step_time_ratio"] > 0
    corrected = trials["gemma4-mlp-float32-product"]
    assert corrected["parity"]["steps_compared"] == 8
    assert 0 < corrected["parity"]["max_kl"] < 1
    assert corrected["rescued_elements"] == 0
    assert trials["bfloat16"]["parity"]["total_kl"] == 0


def test_the_observer_certificate_says_that_watching_changed_nothing(cured: tuple[Finished, Path]) -> None:
    """Bitwise equal with and without the watch."""
    assert report_of(cured[1])["observer"]["bitwise_equal"] is True


def test_the_run_directory_holds_a_report_for_people_and_one_for_programs(cured: tuple[Finished, Path]) -> None:
    """report.md fits a GitHub comment; report.json is strict JSON."""
    markdown = (cured[1] / "report.md").read_text()
    assert len(markdown) < 65_536
    assert "float16-overflow" in markdown
    text = (cured[1] / "report.json").read_text()
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} in report.json"))


def test_without_remedies_the_findings_remain(diagnosed: tuple[Finished, Path]) -> None:
    """Exit 10 and no trials."""
    finished, directory = diagnosed
    assert finished.code == 10
    assert report_of(directory)["trials"] == []


def test_two_runs_with_the_same_seed_give_the_same_numbers(
    cured: tuple[Finished, Path], diagnosed: tuple[Finished, Path]
) -> None:
    """Findings, losses and gradient norms are equal to the last digit."""
    first, second = report_of(cured[1]), report_of(diagnosed[1])
    assert [_verdict(f) for f in first["findings"]] == [_verdict(f) for f in second["findings"]]
    assert _numbers(first["before"]) == _numbers(second["before"])


def _verdict(finding: dict[str, Any]) -> tuple[Any, ...]:
    """A finding without what only the trials of the first run could add."""
    return tuple(finding[key] for key in ("id", "fqn", "op", "phase", "step", "dtype", "source", "summary"))


def _numbers(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["loss"], run["grad_norm"], run["reward"], run["steps_completed"]


@pytest.mark.parametrize("name", ["gemma4_grpo_bf16", "gemma4_grpo_fp32"])
def test_the_healthy_twins_report_nothing(name: str, tmp_path: Path) -> None:
    """bfloat16 and float32 finish without a finding of severity error or warning."""
    finished = dtypedoctor("run", name, "--out", tmp_path / "run")
    assert finished.code == 0, finished.out
    report = report_of(tmp_path / "run")
    assert report["status"] == "healthy"
    assert [f for f in report["findings"] if f["severity"] != "info"] == []


def test_a_run_directory_is_never_overwritten(cured: tuple[Finished, Path]) -> None:
    """The second run into the same directory is refused, and the first one's report is untouched."""
    before = (cured[1] / "report.json").read_bytes()
    finished = dtypedoctor("run", "gemma4_grpo_fp16", "--out", cured[1])
    assert finished.code == 2
    assert "already exists" in finished.err
    assert (cured[1] / "report.json").read_bytes() == before


@pytest.mark.parametrize("format", ["terminal", "md", "json"])
def test_a_finished_run_is_reported_again_without_torch(cured: tuple[Finished, Path], format: str) -> None:
    """`report` renders what is on disk and imports nothing heavy."""
    finished = dtypedoctor("report", cured[1], "--format", format, PYTHONPROFILEIMPORTTIME="1")
    assert finished.code == 0
    assert "float16-overflow" in finished.out
    assert _heavy_imports(finished.err) == []


def test_help_imports_nothing_heavy() -> None:
    """`--help` answers at once because torch, transformers and numpy stay on the other side of the border."""
    finished = dtypedoctor("--help", PYTHONPROFILEIMPORTTIME="1")
    assert finished.code == 0
    assert _heavy_imports(finished.err) == []


def _heavy_imports(profile: str) -> list[str]:
    names = [line.rsplit("|", 1)[-1].strip() for line in profile.splitlines() if line.startswith("import time:")]
    assert len(names) > 20
    return [
        n
        for n in names
        if n.split(".")[0] in {"torch", "transformers", "numpy", "peft", "trl", "datasets", "bitsandbytes"}
    ]
