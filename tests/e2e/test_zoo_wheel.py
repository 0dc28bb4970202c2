"""unsloth_zoo's released patches, unchanged: one that a new signature leaves out in silence, and that of Gemma-4's MLP beside ours."""

import inspect
from pathlib import Path

import pytest
from command import forked, python, report_of
from released_wheels import released
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention

pytestmark = pytest.mark.release

PROGRAMS = Path(__file__).parents[2] / "scenarios" / "real" / "programs"
ALONE = {"OMP_NUM_THREADS": "1"}
PRODUCT = "transformers-gemma4-mlp-product"


@pytest.mark.parametrize("version", ["2026.1.1", "2026.10.9"])
def test_a_patch_that_the_signature_of_the_model_leaves_out_is_found_in_one_run(version: str, tmp_path: Path) -> None:
    """Nothing raises and nothing is logged; the line is the zoo's own. A release whose patch fits is quiet, until transformers renames a parameter."""
    takes = inspect.signature(Gemma3Attention.forward).parameters
    program = PROGRAMS / "zoo_gemma3.py"
    done = forked("exec", "--out", tmp_path / "run", program, released("unsloth_zoo", version), cwd=tmp_path, **ALONE)
    findings = report_of(tmp_path / "run")["findings"]
    if version == "2026.10.9" and "cache" not in takes:
        assert (done.code, findings) == (0, [])
        return
    [found] = findings
    assert (found["id"], found["fqn"]) == ("patch-not-applied", "model.layers.0.self_attn")
    assert found["source"].startswith("unsloth_zoo/temporary_patches/gemma.py:")
    surplus = [name for name in ("past_key_values", "cache_position") if name not in takes]
    if version == "2026.10.9":
        surplus.remove("cache_position")
    assert f": its replacement takes {', '.join(surplus)}, the method does not" in found["summary"]


def test_both_corrections_of_the_gemma4_mlp_train_bitwise_alike_where_nothing_trains_without_one(
    tmp_path: Path,
) -> None:
    """Three steps of TRL's GRPO in float16: rewards, losses and gradient norms."""
    program, steps = str(PROGRAMS / "zoo_gemma4.py"), ("float16", "3", "1e-2")
    ours = forked("treat", "--with", PRODUCT, program, "none", *steps, cwd=tmp_path, **ALONE)
    assert f"{PRODUCT} is in place: transformers" in ours.err
    theirs = python(program, released("unsloth_zoo", "2026.10.9"), *steps, cwd=tmp_path, **ALONE)
    untreated = python(program, "none", *steps, cwd=tmp_path, **ALONE)
    assert steps_of(theirs.out) == steps_of(ours.out)
    assert len(steps_of(ours.out)) == 3
    assert "probability tensor contains either `inf`, `nan`" in untreated.err


def steps_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("step")]
