"""The scenarios on the trainers that are installed (TRL, transformers, peft): what fails is found and fixed, the rest is quiet."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import forked, report_of

from dtypedoctor.lab.scenarios.loading import load_scenario

pytestmark = pytest.mark.release

FOLDER = Path(__file__).parents[2] / "scenarios" / "trainers"
ALL = {
    name: load_scenario(FOLDER / f"{name}.yaml")
    for name in (
        "dpo_reference_bfloat16",
        "dpo_reference_precomputed",
        "grpo_reference_float32",
        "lora_dpo_adapters",
        "qlora_dpo_adapters",
        "qlora_grpo_saved_head",
        "t5_clamped_float16",
    )
}
"""Those that the ordinary suite has time for; ``dtypedoctor run scenarios/trainers`` runs all."""


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """One run of all of them: its folder, and the rows of the matrix by scenario."""
    out = tmp_path_factory.mktemp("trainers") / "out"
    done = forked("run", *(FOLDER / f"{name}.yaml" for name in ALL), "--out", out, OMP_NUM_THREADS="1")
    assert done.code == 0, done.out
    return out, {row["scenario"]: row for row in json.loads((out / "matrix.json").read_text())["rows"]}


@pytest.mark.parametrize("name", ALL)
def test_a_trainer_is_diagnosed_and_fixed_as_its_scenario_says(
    name: str, matrix: tuple[Path, dict[str, dict[str, Any]]]
) -> None:
    """Exactly these findings that are more than notes, some at several places, proven, and each fix; a control has none and completes."""
    expect, row = ALL[name].expect, matrix[1][name]
    found = {finding["id"] for finding in report_of(matrix[0] / name)["findings"] if finding["severity"] != "info"}
    assert (sorted(found), row["as_expected"]) == (sorted(expect.findings), True)
    assert set(expect.cured_by) <= set(row["cured_by"])
    assert (row["confidence"], row["status"] == "healthy") == (("proven", False) if expect.findings else (None, True))


def test_the_module_of_each_failure_is_named(matrix: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    """The first adapter that stalls, and peft's line that multiplies with the trainable head."""
    stalled, head = (
        report_of(matrix[0] / name)["findings"][0] for name in ("qlora_dpo_adapters", "qlora_grpo_saved_head")
    )
    assert stalled["fqn"].endswith("layers.0.self_attn.q_proj.lora_A.default")
    assert (head["fqn"], head["phase"], head["step"]) == ("lm_head", "generate", 1)
    assert head["source"].startswith("peft/utils/other.py:")
