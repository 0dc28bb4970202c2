"""How the edit of a finding was tried: what changes a call, an operator or a run as the edit would is its trial.

Nothing applies the edit itself. Where its trial shows that it does not help, it is told in words and shown as no change.
"""

from collections.abc import Sequence
from dataclasses import replace

from dtypedoctor.diagnosis.edits import ON_THE_OPERATOR, TRIED_AS
from dtypedoctor.diagnosis.rule import Advice, Finding
from dtypedoctor.replay.capsule import CallFix, Capsule, NoCapsule
from dtypedoctor.trials.results import Outcome, Trial

_WHERE = {"call": "on the failing call", "run": "in a run"}


def judge_edits(
    findings: Sequence[Finding],
    advice: Sequence[Advice],
    capsule: Capsule | NoCapsule | None,
    trials: Sequence[Trial],
) -> tuple[Advice, ...]:
    """The advice with how each edit was tried, and without those that were tried and do not help.

    Args:
        findings: the root cause first.
        advice: on each of them.
        capsule: the failing call, on which fixes were tried.
        trials: runs that were made with a fix.
    """
    on_the_call = capsule.fixes if isinstance(capsule, Capsule) else ()  # it fails as the first finding says
    judged = []
    for position, (finding, one) in enumerate(zip(findings, advice, strict=True)):
        how, why_not = _trial(finding, one.maker, () if position else on_the_call, trials)
        text = f"{one.text} It was tried {_WHERE[how]} and does not help: {why_not}." if how and why_not else one.text
        judged.append(replace(one, text=text, edits=() if why_not else one.edits, tried=how))
    return tuple(judged)


def _trial(finding: Finding, maker: str, fixes: Sequence[CallFix], trials: Sequence[Trial]) -> tuple[str | None, str]:
    """How an edit was tried (None: not at all), and why it does not help; empty where it does."""
    fix = TRIED_AS.get(maker)
    for trial in trials:
        if trial.remedy == fix and trial.outcome is not Outcome.NOT_TRIED:
            return "run", "" if trial.outcome is Outcome.FIXED else trial.reason
    for row in fixes:
        # What raises has met a dtype that stands in the module's own code, where the edit would change it.
        if row.fix == fix and row.outcome != Outcome.NOT_TRIED and not row.reason.startswith("raises "):
            return "call", "" if row.outcome == Outcome.FIXED else row.reason
    return ("call" if maker in ON_THE_OPERATOR and finding.proven_by is not None else None), ""
