"""An edit is shown only if nothing that was tried in its place has failed to help."""

from pathlib import Path
from typing import Any

import pytest

from dtypedoctor.diagnosis.rule import Advice, Confidence, Edit, Finding, Severity
from dtypedoctor.examination.examine import judge_edits
from dtypedoctor.examination.results import Outcome, Trial
from dtypedoctor.replay.capsule import Capsule

EDIT = Edit(file="train.py", line=3, old="m = m.half()", new="m = m.bfloat16()")


def _judged(maker: str, *, fixes: tuple[dict[str, Any], ...] = (), trials: tuple[Trial, ...] = (), proof: str | None = None) -> Advice:  # fmt: skip
    finding = Finding(
        id="float16-overflow",
        severity=Severity.ERROR,
        confidence=Confidence.PROVEN,
        summary="It overflows.",
        cause="",
        proven_by=proof,
    )
    advice = Advice(finding=finding.id, text="Use bfloat16.", edits=(EDIT,), maker=maker)
    capsule = Capsule(directory=Path(), description={"fixes": list(fixes)}, bytes=0)
    (judged,) = judge_edits([finding], [advice], capsule, trials)
    return judged


def _on_the_call(outcome: str) -> tuple[dict[str, Any], ...]:
    return ({"fix": "bfloat16", "outcome": outcome, "reason": "the output is not finite"},)


def _run(outcome: Outcome) -> tuple[Trial, ...]:
    return (Trial(remedy="bfloat16", summary="", outcome=outcome, reason="raises in step 2", safe=False),)


@pytest.mark.parametrize(
    ("outcome", "tried", "edits"),
    [("fixed", "call", (EDIT,)), ("not-fixed", "call", ()), ("not-tried", None, (EDIT,))],
)
def test_an_edit_that_does_not_help_on_the_failing_call_is_told_in_words(
    outcome: str, tried: str | None, edits: tuple[Edit, ...]
) -> None:
    """The fix that changes the call as the edit would is its trial."""
    judged = _judged("half-to-bfloat16", fixes=_on_the_call(outcome))
    assert (judged.tried, judged.edits) == (tried, edits)
    assert ("tried on the failing call and does not help: the output is not finite" in judged.text) == (not edits)


def test_a_run_counts_more_than_the_call() -> None:
    """The call passes, and the run with the same fix fails later."""
    judged = _judged("half-to-bfloat16", fixes=_on_the_call("fixed"), trials=_run(Outcome.NOT_FIXED))
    assert (judged.tried, judged.edits) == ("run", ())
    assert "in a run and does not help: raises in step 2" in judged.text


@pytest.mark.parametrize(("proof", "tried"), [("the op run again does not raise", "call"), (None, None)])
def test_a_cast_of_the_failing_line_was_tried_where_the_experiment_proves_it(
    proof: str | None, tried: str | None
) -> None:
    """The operator was run again with the operand cast."""
    assert _judged("cast-operand", proof=proof).tried == tried


def test_an_edit_that_stands_for_no_fix_was_not_tried() -> None:
    """What nothing has changed in its place is not called tried."""
    judged = _judged("lower-learning-rate", fixes=_on_the_call("not-fixed"), trials=_run(Outcome.NOT_FIXED))
    assert (judged.tried, judged.edits) == (None, (EDIT,))
