"""What the trials prove: a cause is settled by the run in which it alone was taken away."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.registry import spec_of
from dtypedoctor.trials.results import Outcome, RunSummary, Trial

__all__ = ["settled"]


def settled(findings: Iterable[Finding], trials: Iterable[Trial]) -> tuple[Finding, ...]:
    """The findings, those proven whose cause was taken away in a trial and took the failure with it."""
    fixed = {t.remedy: t for t in trials if t.outcome is Outcome.FIXED and t.diagnostic is None}
    return tuple(_settled(finding, fixed) for finding in findings)


def _settled(finding: Finding, fixed: Mapping[str, Trial]) -> Finding:
    spec = spec_of(finding.id)
    proving = next((fixed[name] for name in spec.settled_by if name in fixed), None)
    if proving is None or proving.run is None:
        return finding
    others = [fixed[name] for name in spec.supported_by if name in fixed]
    said = [
        f"The same run with {proving.remedy} ({proving.summary}) does {_steps(proving.run)} and shows nothing of this.",
        *(f"So does the run with {t.remedy} ({t.summary}): {_steps(t.run)}." for t in others if t.run),
    ]
    proof = f"the same run with only {proving.remedy} changed ({proving.summary}) shows nothing of this"
    return replace(finding, confidence=Confidence.PROVEN, proven_by=proof, evidence=(*finding.evidence, *said))


def _steps(run: RunSummary) -> str:
    return f"{run.steps_completed} of {run.steps_planned} steps"
