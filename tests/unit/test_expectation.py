"""What a scenario says it shows, compared with what was found."""

from dataclasses import replace

import pytest

from dtypedoctor.diagnosis.rule import Confidence, Finding, Severity
from dtypedoctor.examination.results import Outcome, Trial
from dtypedoctor.lab.scenarios.model import Expectation
from dtypedoctor.lab.trials.judge import expectation_on, is_met, unseen_release

EXPECTED = Expectation(findings=["root", "consequence"], cured_by=["cure"], not_cured_by=["cast"])


def finding(name: str, severity: Severity = Severity.ERROR) -> Finding:
    return Finding(id=name, severity=severity, confidence=Confidence.LIKELY, summary="", cause="")


def trials(**outcomes: Outcome) -> list[Trial]:
    return [Trial(remedy=name, summary="", outcome=outcome, reason="", safe=True) for name, outcome in outcomes.items()]


FOUND = [finding("note", Severity.INFO), finding("root"), finding("consequence"), finding("another")]
TRIED = trials(cure=Outcome.FIXED, cast=Outcome.NOT_FIXED, other=Outcome.FIXED)


def test_further_findings_and_fixes_do_not_break_an_expectation() -> None:
    """Further findings behind the expected ones, notes and other remedies do not matter."""
    assert is_met(EXPECTED, FOUND, TRIED) == (True, "fails with root, consequence, fixed by cure.")
    two = Expectation(findings=["root"], cured_by=["cure", "other"])
    assert is_met(two, FOUND, TRIED) == (True, "fails with root, fixed by cure, other.")


@pytest.mark.parametrize(
    ("found", "tried", "said"),
    [
        (
            [finding("consequence"), finding("root")],
            TRIED,
            "expected findings root, consequence, got consequence, root",
        ),
        ([], TRIED, "expected findings root, consequence, got none"),
        (FOUND, trials(cure=Outcome.NOT_FIXED, cast=Outcome.NOT_FIXED), "cure should be fixed, is not-fixed"),
        (FOUND, trials(cure=Outcome.FIXED, cast=Outcome.FIXED), "cast should be not-fixed, is fixed"),
        (FOUND, trials(cure=Outcome.FIXED, cast=Outcome.NOT_TRIED), "cast should be not-fixed, is not-tried"),
        (FOUND, trials(cure=Outcome.FIXED), "cast should be not-fixed, is unknown"),
        (
            FOUND,
            [replace(one, reason="root recurs") for one in trials(cure=Outcome.NOT_FIXED)],
            "cure should be fixed, is not-fixed (root recurs)",
        ),
    ],
)
def test_what_did_not_come_true_is_said(found: list[Finding], tried: list[Trial], said: str) -> None:
    """A remedy that was not tried has shown nothing, and the root cause must come first."""
    met, sentence = is_met(EXPECTED, found, tried)
    assert not met
    assert said in sentence


def test_an_expectation_for_another_device_expects_nothing() -> None:
    """What only a GPU shows must not fail on a laptop, and must be shown on the GPU."""
    on_cuda = EXPECTED.model_copy(update={"only_on": "cuda"})
    assert expectation_on(on_cuda, "cpu") == Expectation()
    assert expectation_on(on_cuda, "cuda:0") == on_cuda
    assert expectation_on(EXPECTED, "cpu") == EXPECTED
    assert is_met(Expectation(), [], []) == (True, "healthy.")
    assert is_met(Expectation(), FOUND, [])[0] is False


@pytest.mark.parametrize(
    ("installed", "sentence"),
    [
        ("5.23.1", ""),
        ("5.9", ""),
        ("5.24.0", "transformers 5.24.0 is installed, this was seen with transformers<5.24."),
        ("6.0.0rc1", "transformers 6.0.0rc1 is installed, this was seen with transformers<5.24."),
        (None, ""),
    ],
)
def test_an_expectation_is_not_judged_with_releases_it_was_not_seen_with(installed: str | None, sentence: str) -> None:
    """A library that changes is no mistake of the scenario; one that is not installed is told otherwise."""
    expect = Expectation(seen_with=["transformers<5.24", "torch>=2.9"])
    versions = {"torch": "2.13.0+cpu"} | ({"transformers": installed} if installed else {})
    assert unseen_release(expect, versions) == sentence
