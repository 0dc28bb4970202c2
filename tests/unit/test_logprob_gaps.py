"""Which of the ways in which log-probabilities come to differ is said, and how sure."""

from dataclasses import replace
from typing import Any

import pytest
from traces import TraceBuilder

from dtypedoctor.diagnosis.rule import Confidence, Finding, Severity
from dtypedoctor.rules.silent.logprob_gap import SPEC, detect_gap
from dtypedoctor.trace.events import Observed
from dtypedoctor.trace.records.silent import DecodedTokens, RoundedLogprobs, Twins, UpdatedCopies

TWINS = Twins(
    trainer=0, generator=1, trainer_dtype="float32", generator_dtype="bfloat16", rows=64, choices=1, largest_gap=0.05,
    mean_gap=0.01, moved=0.05, apart=1e-5,
)  # fmt: skip
DECODED = DecodedTokens(model=0, dtype="bfloat16", tokens=40, largest_gap=0.9, mean_gap=0.3, rounding=0.004)
ROUNDED = RoundedLogprobs(
    dtype="bfloat16", sides=["new"], how="cast", rounded_at="loss.py:3", used_at="loss.py:9", use="difference", elements=64,
    largest=4.0, largest_gap=0.02, error=0.01, mean_error=0.002, measured=True,
)  # fmt: skip


def found(*what: Any) -> list[Finding]:
    """What is found where this was observed in step 3."""
    trace = TraceBuilder()
    trace.add(*(Observed(n=trace.n(), step=3, call=3, phase="backward", fqn=None, what=one) for one in what))
    return list(detect_gap(trace.build()))


def changed(what: Any, **fields: Any) -> Any:
    """The record with other fields."""
    return replace(what, **fields)


def test_weights_of_one_dtype_have_the_dtype_of_the_region_that_one_is_called_in() -> None:
    """The generator's before the trainer's."""
    regions = {"trainer_dtype": "float32", "generator_dtype": "float32"}
    assert found(changed(TWINS, **regions, generator_autocast="float16"))[0].dtype == "float16"
    assert found(changed(TWINS, **regions, trainer_autocast="bfloat16"))[0].dtype == "bfloat16"


@pytest.mark.parametrize("stored_at", ["library/kernels.py:7", None])
def test_stale_copies_that_make_the_difference_are_named_with_what_to_do(stored_at: str | None) -> None:
    """Which no dtype is; where several files keep a copy of that name there is no line."""
    copies = UpdatedCopies(
        number=2, module="q.lora_A", attribute="_fast", stored_at=stored_at, before=0.09, after=0.002
    )
    (one,) = found(changed(DECODED, copies=copies))
    assert (one.fqn, one.source, one.confidence) == ("q.lora_A", stored_at, Confidence.PROVEN)
    assert "0.09 off on average, and 0.002 with the copies made anew" in one.proven_by
    assert (str(stored_at) in SPEC.instead(one)) is (stored_at is not None)
    (other,) = found(DECODED)
    assert "after each optimizer step" in SPEC.instead(other) != SPEC.instead(one)
    assert not SPEC.instead(found(TWINS)[0])


def test_two_models_in_two_dtypes_explain_decoded_tokens_too() -> None:
    """One finding, and of several decodings the first."""
    assert len(found(TWINS, DECODED)) == 1
    assert len(found(DECODED, changed(DECODED, tokens=7))) == 1


def test_the_worst_rounding_is_told_with_its_lines_and_side() -> None:
    """What a model computes in its own dtype is not told beside a finding about that dtype."""
    (one,) = found(ROUNDED, changed(ROUNDED, error=0.2, sides=["new", "old"], how="computed"))
    assert one.summary == (
        "Both log-probabilities are computed in bfloat16 at loss.py:3, and loss.py:9 compares them: "
        "that moves their difference by up to 0.2."
    )
    assert (one.source, one.confidence, one.severity) == ("loss.py:3", Confidence.PROVEN, Severity.WARNING)
    (single,) = found(changed(ROUNDED, measured=False, error=0.0005))
    assert single.summary.startswith("The new log-probabilities are cast to bfloat16 at loss.py:3")
    assert "can move" in single.summary
    assert "The values before were not seen" in single.evidence[1]
    assert "by 0.002 on average" in one.evidence[1]
    assert (single.confidence, single.severity) == (Confidence.LIKELY, Severity.INFO)
    assert [one.summary.split(" ")[0] for one in found(TWINS, changed(ROUNDED, how="computed"))] == ["The"]
    assert len(found(TWINS, ROUNDED)) == 2


def test_a_divergence_is_told_with_the_share_of_rounding_in_it() -> None:
    """Likely and not proven: nothing was computed again."""
    what = changed(ROUNDED, use="divergence", how="computed", sides=["new", "old"], largest_gap=-0.005, error=0.012)
    (one,) = found(what)
    assert one.summary == (
        "Both log-probabilities are computed in bfloat16 at loss.py:3, and loss.py:9 compares the distributions: "
        "rounding is 0.012 of a divergence of -0.005 per token."
    )
    assert (one.confidence, len(one.evidence)) == (Confidence.LIKELY, 1)
