"""Remedies are changes of scenarios: what each changes, and that the others stay as they are."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from traces import TraceBuilder

from dtypedoctor.diagnosis.wording import class_of_named
from dtypedoctor.examination.fixes import remedies, remedy_named
from dtypedoctor.examination.results import RunSummary, run_of_fix
from dtypedoctor.lab.scenarios.model import Scenario
from dtypedoctor.lab.trials.changes import (
    all_of,
    autocast_of_model,
    change_of,
    float32_twin,
    healthy_reference,
    with_autocast,
    with_corrections,
)

LLAMA: dict[str, Any] = {
    "name": "builtin:llama-nf4-fused",
    "dtype": "bfloat16",
    "quantization": {"quant_state_dtype": "float16"},
}


def scenario(*steps: dict[str, Any], **more: Any) -> Scenario:
    """A scenario of forward passes, a step for each model (None for an unloading)."""
    built = [
        {"model": step.get("model"), "workload": {"kind": "forward" if step.get("model") else "unload"}} | step
        for step in steps
    ]
    return Scenario.model_validate({"name": "case", "summary": "A case.", "steps": built, **more})


@pytest.mark.parametrize(
    "remedy", ["out-of-place-addmm", "dequant-float32-kernel", "cast-at-lora-input", "casts-everywhere"]
)
def test_kernels_of_the_doctors_own_are_not_corrected_in_a_script(remedy: str) -> None:
    """A script has other kernels, so the remedy leaves it as it is and cannot be asked for."""
    script = Scenario.model_validate(
        {"name": "case", "summary": "A case.", "steps": [{"workload": {"kind": "script", "path": "train.py"}}]}
    )
    assert change_of(remedies()[remedy])(script) == script
    assert change_of(remedies()[remedy])(scenario({"model": LLAMA})).corrections


def test_without_a_region_nothing_is_put_right() -> None:
    """An equal scenario says that there was nothing to change."""
    plain = scenario({"model": LLAMA})
    assert autocast_of_model(plain) == plain
    assert with_autocast(None)(plain) == plain


def test_changes_one_after_the_other() -> None:
    """A remedy may consist of several."""
    given = scenario({"model": LLAMA, "autocast": {"dtype": "float16"}})
    both = all_of(autocast_of_model, with_corrections("quant-state-dtype"))(given)
    assert both == change_of(remedies()["autocast-and-quant-state-dtype"])(given)
    assert both.steps[0].autocast is not None
    assert (both.steps[0].autocast.dtype, both.corrections[0].id) == ("bfloat16", "quant-state-dtype")


def test_the_healthy_reference_has_one_dtype_throughout() -> None:
    """Quantisation states and autocast regions would contradict it; without a `reference` there is none."""
    given = scenario({"model": LLAMA, "autocast": {"dtype": "float16"}}, reference={"dtype": "bfloat16"})
    found = healthy_reference(given)
    assert found is not None
    assert found.steps[0].autocast is None
    assert found.steps[0].model is not None
    assert found.steps[0].model.quantization is not None
    assert found.steps[0].model.quantization.quant_state_dtype is None
    assert healthy_reference(scenario({"model": LLAMA})) is None


def test_a_script_has_no_float32_twin() -> None:
    """Its models are built by code that nobody here has written."""
    assert float32_twin(scenario({"workload": {"kind": "script", "path": "train.py"}})) is None


def test_what_casts_without_a_word_is_called_unsafe() -> None:
    """A cast that nobody asked for turns wrong weights into silently wrong results."""
    unsafe = {remedy.id for remedy in remedies().values() if not remedy.safe}
    assert {"cast-after-dequantize", "backward-autocast-off", "decode-in-input-dtype", "casts-everywhere"} <= unsafe
    assert unsafe.isdisjoint(
        {"quant-state-dtype", "autocast-dtype-of-model", "dequant-buffer-keyed-by-dtype", "strict"}
    )


def test_the_run_of_any_fix_has_a_directory_of_its_own(tmp_path: Path) -> None:
    """`bisect` may name a hundred modules, whose list is longer than the name of a file can be."""
    modules = [f"model.layers.{i}.mlp" for i in range(40)]
    fixes = [
        "bfloat16",
        "keep-float32:model[1]",
        *(f"keep-float32:{','.join(modules)},{last}" for last in ("a", "b", "größe")),
    ]
    for fix in fixes:
        (tmp_path / run_of_fix(fix)).mkdir()
    assert (tmp_path / "remedy-bfloat16").is_dir()


def test_a_number_that_is_spelled_wrong_is_not_a_number() -> None:
    """A report.json may come from anywhere."""
    run = RunSummary(
        label="before",
        steps_completed=3,
        steps_planned=3,
        ended="completed",
        loss=(None, None, 2.0),
        nonfinite={"loss": {"0": "inf", "1": "?"}},
    )
    assert str(run.numbers("loss")) == "(inf, nan, 2.0)"


def test_a_module_that_is_kept_in_float32_is_named_with_its_class() -> None:
    """`attn.0` alone does not say what is kept; nor does a number, as which a part of a sequence is named."""
    trace = TraceBuilder().sample("body.attn.0", 1.0, cls="Attention").sample("1", 1.0, cls="Gated").build()

    def change(name: str) -> str:
        remedy = remedy_named(f"keep-float32:{name}", partial(class_of_named, trace))
        assert remedy is not None
        return remedy.summary.removesuffix(" in float32: parameters, inputs and arithmetic")

    assert change("attn.0") == "run attn.0 (Attention)"
    assert change("model[1],body.attn.0") == "run model[1] (Gated) and body.attn.0 (Attention)"
    assert change("attn.0::self,elsewhere") == "run attn.0::self (Attention) and elsewhere"
