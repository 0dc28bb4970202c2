"""What runs with one thing changed prove: a cause that a remedy alone takes away, a condition that a failure requires."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from dtypedoctor.analysis import analysis_of
from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.registry import spec_of
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.trace.events import Condition
from dtypedoctor.trace.model import Trace
from dtypedoctor.trials.results import Bearing, Diagnostic, Outcome, RunSummary, Trial

__all__ = ["apply_ablations", "confirm_by_trials", "diagnostic", "without_effect"]


FLOAT32 = "autocast-off"
"""The ablation under which a program that relies on autocast computes in float32."""

_REMOVED = {
    "autocast-off": "autocast",
    "eager-attention": "fused attention",
    "compile-off": "torch.compile",
    "loss-scale-one": "the loss scale",
}
"""What each ablation removes, in words."""


def without_effect(condition: str, scenario: Scenario, trace: Trace) -> str:
    """Why a run under ``condition`` was no trial of it; empty if it was, or if it was not switched from outside."""
    if condition not in scenario.conditions:
        return ""
    last = _last(condition, trace)
    if last is None:
        return "it never took effect before the process died"
    return "" if last.effects else f"it never took effect: {last.reason}"


def diagnostic(
    condition: str, scenario: Scenario, trace: Trace, before: Trace | None, *, passes: bool
) -> Diagnostic | None:
    """What the run under ``condition`` says about the run ``before``; None where nothing was switched from outside.

    Args:
        condition: its id.
        scenario: what was run.
        trace: of that run.
        before: trace of the untreated run; None where that did not fail.
        passes: whether nothing speaks against calling the run cured.
    """
    last = _last(condition, trace)
    if condition not in scenario.conditions or last is None:
        return None
    if before is None:
        return Diagnostic(effects=last.effects)
    if passes:
        return Diagnostic(effects=last.effects, bearing=Bearing.NEEDED)
    alike = bool(analysis_of(trace).places & analysis_of(before).places)
    return Diagnostic(effects=last.effects, bearing=Bearing.NOT_NEEDED if alike else Bearing.MOVED)


def _last(condition: str, trace: Trace) -> Condition | None:
    return next((c for c in reversed(trace.all(Condition)) if c.id == condition), None)


def apply_ablations(findings: Iterable[Finding], trials: Iterable[Trial]) -> tuple[Finding, ...]:
    """The findings with what the runs under other conditions say of them.

    A run speaks of the findings that propose it and of the first one. It proves a finding that names the condition as its cause,
    or takes its proof away.
    """
    known = tuple(findings)
    tried = [(trial, trial.diagnostic) for trial in trials if trial.diagnostic is not None and trial.diagnostic.bearing]
    return tuple(
        _ablated(f, [t for t in tried if number == 0 or t[0].remedy in f.remedies]) for number, f in enumerate(known)
    )


def _ablated(finding: Finding, tried: Iterable[tuple[Trial, Diagnostic]]) -> Finding:
    spec = spec_of(finding.id)
    for trial, found in tried:
        claimed = spec.needs == trial.remedy
        if spec.in_float32_too and trial.remedy == FLOAT32:
            finding = _with_float32(finding, trial, found)
        if claimed and found.bearing is Bearing.NEEDED and spec.needs_only:
            proof = f"changing only {trial.remedy} ({trial.summary}) makes the failure disappear"
            finding = replace(finding, confidence=Confidence.PROVEN, proven_by=proof)
        if claimed and found.bearing is Bearing.NOT_NEEDED:
            finding = replace(finding, confidence=Confidence.POSSIBLE, proven_by=None)
        finding = replace(finding, evidence=(*finding.evidence, *_said(trial, found, claimed=claimed)))
    return finding


def _with_float32(finding: Finding, trial: Trial, found: Diagnostic) -> Finding:
    """One that claims to be no matter of the dtype, after a run without autocast: proven where that fails too, else no more than possible."""
    if found.bearing is Bearing.NOT_NEEDED:
        proof = f"with only {trial.remedy} changed ({trial.summary}) the first inf or NaN is in the same place"
        return replace(finding, confidence=Confidence.PROVEN, proven_by=proof)
    possible = found.bearing is Bearing.NEEDED
    return replace(finding, confidence=Confidence.POSSIBLE, proven_by=None) if possible else finding


def _said(trial: Trial, found: Diagnostic, *, claimed: bool) -> Iterator[str]:
    removed = _REMOVED.get(trial.remedy, trial.remedy)
    times = "once" if found.effects == 1 else f"{found.effects} times"
    run = f"Ablation {trial.remedy}, which took effect {times}"
    if found.bearing is Bearing.NEEDED:
        yield f"{run}: the failure does not recur. It requires {removed} (diagnostic only, not a fix)."
    elif found.bearing is Bearing.NOT_NEEDED:
        yield f"{run}: the run fails in the same way. The failure does not require {removed}."
        if claimed:
            yield "That contradicts the cause named here, so the finding is not proven."
    else:
        yield f"{run}: the run fails elsewhere ({trial.reason}). Whether the failure requires {removed} stays open."


def confirm_by_trials(findings: Iterable[Finding], trials: Iterable[Trial]) -> tuple[Finding, ...]:
    """The findings, those proven whose cause was taken away in a trial and took the failure with it."""
    fixed = {t.remedy: t for t in trials if t.outcome is Outcome.FIXED and t.diagnostic is None}
    return tuple(_confirmed(finding, fixed) for finding in findings)


def _confirmed(finding: Finding, fixed: Mapping[str, Trial]) -> Finding:
    spec = spec_of(finding.id)
    proving = next((fixed[name] for name in spec.settled_by if name in fixed), None)
    if proving is None or proving.run is None:
        return finding
    others = [fixed[name] for name in spec.supported_by if name in fixed]
    said = [
        f"With {proving.remedy} ({proving.summary}) the run completes {_steps(proving.run)}; the failure does not recur.",
        *(f"The same with {t.remedy} ({t.summary}): {_steps(t.run)}." for t in others if t.run),
    ]
    proof = f"changing only {proving.remedy} ({proving.summary}) makes the failure disappear"
    return replace(finding, confidence=Confidence.PROVEN, proven_by=proof, evidence=(*finding.evidence, *said))


def _steps(run: RunSummary) -> str:
    return f"{run.steps_completed}/{run.steps_planned} steps"
