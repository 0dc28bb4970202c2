"""NeMo Automodel's released LoRA layers and cast, unchanged: what stays in float32, what that promotes, and which values it has."""

from pathlib import Path

import pytest
from command import forked, in_this_process, report_of
from released_wheels import released

pytestmark = pytest.mark.release

PROGRAM = Path(__file__).parents[2] / "scenarios" / "real" / "programs" / "nemo_lora.py"
VALUES = "nemo-keep-float32-values"
MISSING = "cast_model_to_dtype has no `_restore_fp32_modules(model, fp32_keywords)`"


def test_promoting_norms_before_the_released_lora_layer_are_found(tmp_path: Path) -> None:
    """The line that raises is NeMo Automodel's; a cast at its LoRA layers only moves the error to the head, the next layer."""
    path = {"PYTHONPATH": str(released("nemo_automodel", "0.4.0")), "OMP_NUM_THREADS": "1"}
    tried = "--try", "norm-output-cast", "--try", "nemo-lora-input-dtype"
    done = forked("exec", *tried, "--out", tmp_path / "run", PROGRAM, "norms", "half", **path)
    report = report_of(tmp_path / "run")
    found = report["findings"][0]
    assert done.code == 10
    assert (found["id"], found["confidence"]) == ("norm-promotes-to-float32", "proven")
    assert (found["fqn"], found["op"]) == ("model.layers.0.input_layernorm", "aten.mm.default")
    assert found["source"] == "nemo_automodel/components/_peft/lora.py:269"
    outcomes = {trial["remedy"]: trial["outcome"] for trial in report["trials"]}
    assert (outcomes["norm-output-cast"], outcomes["nemo-lora-input-dtype"]) == ("fixed", "not-fixed")


def test_float32_values_that_the_released_cast_rounds_are_found_and_corrected(tmp_path: Path) -> None:
    """Release 0.4.0 casts what it keeps to bfloat16 and back; corrected, the rotary table has the values that it was made with."""
    path = {"PYTHONPATH": str(released("nemo_automodel", "0.4.0")), "OMP_NUM_THREADS": "1"}
    done = forked("exec", "--try", VALUES, "--out", tmp_path / "run", PROGRAM, "rotary", "half", **path)
    report = report_of(tmp_path / "run")
    assert done.code == 10
    assert [(one["id"], one["fqn"], one["dtype"]) for one in report["findings"]] == [
        ("rounded-rotary-buffer", "model.rotary_emb", "float32")
    ]
    assert report["findings"][0]["source"] == "nemo_automodel/components/models/common/utils.py:436"
    assert report["findings"][0]["remedies"] == [VALUES]
    assert {trial["remedy"]: trial["outcome"] for trial in report["trials"]} == {VALUES: "fixed"}


def test_the_release_with_its_own_fix_is_quiet(tmp_path: Path) -> None:
    """0.5.0 takes the values before the cast."""
    path = {"PYTHONPATH": str(released("nemo_automodel", "0.5.0")), "OMP_NUM_THREADS": "1"}
    done = forked("exec", "--out", tmp_path / "run", PROGRAM, "rotary", "half", **path)
    assert (done.code, report_of(tmp_path / "run")["findings"]) == (0, [])


@pytest.mark.parametrize(
    ("version", "refusal"),
    [
        ("0.2.0", "nemo_automodel 0.2.0: it has no nemo_automodel.components.models.common.utils"),
        ("0.3.0", "defines no cast_model_to_dtype"),
        ("0.4.0", ""),
        ("0.5.0", MISSING),
        ("0.7.0", MISSING),
    ],
)
def test_a_release_is_corrected_or_refused_with_the_difference(version: str, refusal: str) -> None:
    """The LoRA layer is the same in all of them; the cast has changed."""
    source = released("nemo_automodel", version)
    assert in_this_process("explain", "nemo-lora-input-dtype", "--patch", "--source", source).code == 0
    done = in_this_process("explain", VALUES, "--patch", "--source", source)
    assert (done.code == 0) == (refusal == "")
    assert refusal in done.err
