"""Decides whether a remedy has cured."""

from collections.abc import Iterator
from dataclasses import dataclass

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.modules import first_nonfinite
from dtypedoctor.runner.launch import Run
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.trace.events import Correction, Metric, Raised
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.parity import parity
from dtypedoctor.trials.remedies import Remedy
from dtypedoctor.trials.results import Outcome, RunSummary, Trial
from dtypedoctor.trials.summary import how_it_ended, summarise

MIN_STEPS_FOR_RATIO = 3
"""Fewer steps than this say nothing about step time: the first one warms up."""

WRONG_OUTPUT = 0.25
"""Outputs with a larger relative error are wrong, not rounded: float16 and bfloat16 stay below 0.02 on the builtin models,
weights that were read in another format than they were written in give 0.7 and more."""

STRICT_ERROR = "MixedDtypesError"
"""What the strict forms of the kernels raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """What a trial is compared with.

    Attributes:
        before: the untreated run.
        findings: what was found in it.
        reference: summary and trace of the healthy run, where there is one.
        twin: trace of the float32 twin, where there is one.
    """

    before: RunSummary
    findings: tuple[Finding, ...]
    reference: tuple[RunSummary, Trace] | None = None
    twin: Trace | None = None


def judge(remedy: Remedy, scenario: Scenario, run: Run, yardstick: Yardstick) -> Trial:
    """The trial of ``remedy``: ``run`` is the run of the changed scenario, ``scenario``."""
    refused = next((c for c in run.trace.all(Correction) if not c.installed), None)
    if refused is not None:
        return not_tried(remedy, f"the correction could not be installed: {refused.reason}")
    after = summarise(remedy.id, run, scenario, yardstick.twin)
    reason = next(_objections(remedy, run, after, yardstick.findings), "")
    base = _ratio_base(yardstick)
    last = {c.id: c for c in run.trace.all(Correction)}
    return Trial(
        remedy=remedy.id,
        summary=remedy.summary,
        outcome=Outcome.NOT_FIXED if reason else Outcome.FIXED,
        reason=reason or "all steps done, the finding is gone, everything finite",
        safe=remedy.safe,
        run=after,
        parity=parity(run.trace, yardstick.reference[1]) if yardstick.reference else None,
        rescued_elements=sum(c.rescued for c in last.values()) if last else None,
        clamped_elements=sum(c.clamped for c in last.values()) if last else None,
        step_time_ratio=_ratio(after.step_time, base.step_time if base else None),
        peak_memory_ratio=_ratio(after.peak_memory, base.peak_memory if base else None),
        ratio_base=base.label if base else None,
        output_error=after.output_error,
    )


def not_tried(remedy: Remedy, reason: str) -> Trial:
    """A trial that says why there was none."""
    return Trial(remedy=remedy.id, summary=remedy.summary, outcome=Outcome.NOT_TRIED, reason=reason, safe=remedy.safe)


def _objections(remedy: Remedy, run: Run, after: RunSummary, findings: tuple[Finding, ...]) -> Iterator[str]:
    """What speaks against calling the run cured, the plainest first."""
    ended = how_it_ended(run)
    if ended != "completed":
        raised = run.trace.last(Raised)
        strict = remedy.strict and raised is not None and raised.type == STRICT_ERROR
        yield f"raises as it should, where a cast would have hidden it: {ended}" if strict else ended
    if after.steps_completed < after.steps_planned:
        yield f"only {after.steps_completed} of {after.steps_planned} steps done"
    errors = {f.id for f in findings if f.severity is not Severity.INFO}
    for finding in diagnose(run.trace):
        if finding.id in errors or finding.severity is Severity.ERROR:
            yield f"{finding.id} is still there"
    bad = first_nonfinite(run.trace)
    if bad is not None:
        yield f"{bad[1].fqn} is not finite in step {bad[0].step}"
    for metric in run.trace.all(Metric):
        if metric.nonfinite:
            yield f"{', '.join(metric.nonfinite)} not finite in step {metric.step}"
    if after.output_error is not None and after.output_error > WRONG_OUTPUT:
        yield f"runs, but computes something else: relative output error {after.output_error:.2g} against float32"


def _ratio_base(yardstick: Yardstick) -> RunSummary | None:
    """The run to compare costs with: the untreated one if it lived long enough to say anything, else the reference."""
    if yardstick.before.steps_completed >= MIN_STEPS_FOR_RATIO:
        return yardstick.before
    return yardstick.reference[0] if yardstick.reference else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None
