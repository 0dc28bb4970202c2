"""Decides whether a remedy has cured."""

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.modules import first_nonfinite
from dtypedoctor.runner.launch import Run
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.trace.events import Correction, Metric
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.parity import parity
from dtypedoctor.trials.remedies import Remedy
from dtypedoctor.trials.results import Outcome, RunSummary, Trial
from dtypedoctor.trials.summary import how_it_ended, summarise

MIN_STEPS_FOR_RATIO = 3
"""Fewer steps than this say nothing about step time: the first one warms up."""


def judge(remedy: Remedy, scenario: Scenario, run: Run, before: tuple[RunSummary, tuple[Finding, ...]],
          reference: tuple[RunSummary, Trace] | None) -> Trial:  # fmt: skip
    """The trial of ``remedy``: ``run`` is the changed scenario's run.

    Args:
        before: summary and findings of the untreated run.
        reference: summary and trace of the healthy run, where there is one.
    """
    refused = next((c for c in run.trace.all(Correction) if not c.installed), None)
    if refused is not None:
        return not_tried(remedy, f"the correction could not be installed: {refused.reason}")
    after = summarise(remedy.id, run, scenario)
    reason = _why_not(run, after, before[1])
    base = _ratio_base(before[0], reference[0] if reference else None)
    last = {c.id: c for c in run.trace.all(Correction)}
    return Trial(
        remedy=remedy.id,
        summary=remedy.summary,
        outcome=Outcome.NOT_FIXED if reason else Outcome.FIXED,
        reason=reason or "all steps done, the finding is gone, everything finite",
        safe=remedy.safe,
        run=after,
        parity=parity(run.trace, reference[1]) if reference else None,
        rescued_elements=sum(c.rescued for c in last.values()) if last else None,
        clamped_elements=sum(c.clamped for c in last.values()) if last else None,
        step_time_ratio=_ratio(after.step_time, base.step_time if base else None),
        peak_memory_ratio=_ratio(after.peak_memory, base.peak_memory if base else None),
        ratio_base=base.label if base else None,
    )


def not_tried(remedy: Remedy, reason: str) -> Trial:
    """A trial that says why there was none."""
    return Trial(remedy=remedy.id, summary=remedy.summary, outcome=Outcome.NOT_TRIED, reason=reason, safe=remedy.safe)


def _why_not(run: Run, after: RunSummary, findings: tuple[Finding, ...]) -> str:
    """Why the run is not cured; empty if it is."""
    ended = how_it_ended(run)
    if ended != "completed":
        return ended
    if after.steps_completed < after.steps_planned:
        return f"only {after.steps_completed} of {after.steps_planned} steps done"
    errors = {f.id for f in findings if f.severity is not Severity.INFO}
    still = [f.id for f in diagnose(run.trace) if f.id in errors or f.severity is Severity.ERROR]
    if still:
        return f"{still[0]} is still there"
    bad = first_nonfinite(run.trace)
    if bad is not None:
        return f"{bad[1].fqn} is not finite in step {bad[0].step}"
    spoilt = next((m for m in run.trace.all(Metric) if m.nonfinite), None)
    if spoilt is not None:
        return f"{', '.join(spoilt.nonfinite)} not finite in step {spoilt.step}"
    return ""


def _ratio_base(before: RunSummary, reference: RunSummary | None) -> RunSummary | None:
    """The run to compare costs with: the untreated one if it lived long enough to say anything, else the reference."""
    return before if before.steps_completed >= MIN_STEPS_FOR_RATIO else reference


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
