"""Findings that a trial proves."""

from dataclasses import replace

from dtypedoctor.diagnosis import finding_ids, spec_of
from dtypedoctor.diagnosis.rule import Confidence, Finding, Severity
from dtypedoctor.examination.fixes import remedies
from dtypedoctor.examination.results import Outcome, RunSummary, Trial
from dtypedoctor.lab.trials.judge import confirm_by_trials


def finding(name: str = "quant-state-dtype") -> Finding:
    """Likely, with one piece of evidence."""
    return Finding(
        id=name,
        severity=Severity.ERROR,
        confidence=Confidence.LIKELY,
        summary="It fails.",
        cause="Because.",
        evidence=("Measured.",),
    )


def trial(remedy: str, outcome: Outcome = Outcome.FIXED, *, ran: bool = True) -> Trial:
    """A trial of three steps."""
    return Trial(
        remedy=remedy,
        summary="change one thing",
        outcome=outcome,
        reason="",
        safe=True,
        run=RunSummary(label=remedy, steps_completed=3, steps_planned=3) if ran else None,
    )


def test_every_counterfactual_is_a_safe_remedy() -> None:
    """A remedy that may hide a failure cannot prove its cause."""
    named = {name for finding in finding_ids() for name in spec_of(finding).settled_by}
    assert all(remedies()[name].safe and not remedies()[name].strict for name in named)


def test_another_cure_of_the_same_finding_is_told_and_proves_nothing_by_itself() -> None:
    """Without autocast a contradiction is gone, but so is every other thing that autocast does."""
    found = finding("autocast-contradicts-model")
    assert confirm_by_trials([found], [trial("autocast-off")]) == (found,)
    (both,) = confirm_by_trials([found], [trial("autocast-off"), trial("autocast-dtype-of-model")])
    assert both.confidence is Confidence.PROVEN
    assert [sentence.partition(" (")[0] for sentence in both.evidence[1:]] == [
        "With autocast-dtype-of-model",
        "The same with autocast-off",
    ]


def test_how_many_steps_a_script_plans_is_not_made_up() -> None:
    """Nobody but the script knows."""
    tried = trial("quant-state-dtype")
    assert tried.run is not None
    tried = replace(tried, run=replace(tried.run, steps_completed=20, steps_planned=0))
    (found,) = confirm_by_trials([finding()], [tried])
    assert found.evidence[-1].endswith("the run completes 20 steps; the failure does not recur.")
