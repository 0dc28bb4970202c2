"""Decides whether a remedy has fixed a run, and whether a scenario showed what it says it shows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtypedoctor.analysis import analysis_of, ending_of
from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.registry import canonical
from dtypedoctor.diagnosis.wording import failing_line
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.model import Expectation, Scenario
from dtypedoctor.trace.events import Correction, Raised
from dtypedoctor.trace.model import Trace
from dtypedoctor.trials.proof import diagnostic, without_effect
from dtypedoctor.trials.remedies import Remedy
from dtypedoctor.trials.results import WRONG_OUTPUT, Diagnostic, Outcome, RunSummary, Trial
from dtypedoctor.trials.summary import parity, summarise

__all__ = ["Baselines", "expectation_on", "is_met", "judge", "not_tried"]


MIN_STEPS_FOR_RATIO = 3
"""Fewer steps than this say nothing about step time: the first one warms up."""

MISMATCH = "TargetMismatchError"
"""How the reason begins for which a correction does not fit the model that it was to be installed in."""

STRICT_ERROR = "MixedDtypesError"
"""What the strict forms of the kernels raise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """What a trial is compared with.

    Attributes:
        before: the untreated run.
        findings: what was found in it.
        reference: summary and trace of the healthy run, where there is one.
        twin: trace of the float32 twin, where there is one.
        raised: what the untreated run raised, where it did.
        failed: trace of the untreated run, where it failed.
    """

    before: RunSummary
    findings: tuple[Finding, ...]
    reference: tuple[RunSummary, Trace] | None = None
    twin: Trace | None = None
    raised: Raised | None = None
    failed: Trace | None = None


def judge(remedy: Remedy, scenario: Scenario, run: Run, baselines: Baselines) -> Trial:
    """The trial of ``remedy``: ``run`` is the run of the changed scenario, ``scenario``."""
    refused = next((c for c in run.trace.all(Correction) if not c.installed), None)
    if refused is not None:
        return not_tried(remedy, _why_not_installed(refused))
    idle = without_effect(remedy.id, scenario, run.trace)
    if idle:
        return not_tried(remedy, idle, condition=True)
    after = summarise(remedy.id, run, scenario, baselines.twin)
    reason = next(_objections(remedy, run, after, baselines), "")
    base = _ratio_base(baselines)
    last = {c.id: c for c in run.trace.all(Correction)}
    probe = diagnostic(remedy.id, scenario, run.trace, baselines.failed, passes=not reason)
    return Trial(
        remedy=remedy.id,
        summary=remedy.summary,
        outcome=Outcome.NOT_FIXED if reason else Outcome.FIXED,
        reason=reason or f"all steps completed, the finding does not recur, {_finite(run.trace)}",
        safe=remedy.safe and probe is None,
        run=after,
        parity=parity(run.trace, baselines.reference[1]) if baselines.reference else None,
        rescued_elements=sum(c.rescued for c in last.values()) if last else None,
        clamped_elements=sum(c.clamped for c in last.values()) if last else None,
        step_time_ratio=_ratio(after.step_time, base.step_time if base else None),
        peak_memory_ratio=_ratio(after.peak_memory, base.peak_memory if base else None),
        ratio_base=base.label if base else None,
        output_error=after.output_error,
        as_intended=_as_intended(remedy, run),
        never_reached=_never_reached(run, baselines.raised),
        diagnostic=probe,
    )


def _finite(trace: Trace) -> str:
    bad = any(not sample.finite for sample in trace.samples)
    return "no inf or NaN that matters" if bad else "everything measured is finite"


def _why_not_installed(refused: Correction) -> str:
    """A correction that finds nothing to correct does not apply; any other reason is trouble with installing it."""
    kind, _, why = refused.reason.partition(": ")
    return (
        f"it does not apply here: {why}"
        if kind == MISMATCH
        else f"the correction could not be installed: {refused.reason}"
    )


def _never_reached(run: Run, before: Raised | None) -> bool:
    """Whether the run failed exactly as the untreated one, and nothing had called any of its corrections until then."""
    installed = {c.id for c in run.trace.all(Correction)}
    uncalled = {c.id for c in run.trace.uncalled_corrections}
    raised = analysis_of(run.trace).raised
    same = before is not None and raised is not None and _error(raised) == _error(before)
    return bool(installed) and installed == uncalled and same


def _error(raised: Raised) -> tuple[str, str, str | None]:
    return raised.type, raised.message, failing_line(raised)


def _as_intended(remedy: Remedy, run: Run) -> bool:
    """Whether a strict remedy has raised what strict kernels raise."""
    raised = analysis_of(run.trace).raised
    return remedy.strict and raised is not None and raised.type == STRICT_ERROR


def not_tried(remedy: Remedy, reason: str, *, condition: bool = False) -> Trial:
    """A trial that says why there was none; ``condition`` where it would have been a run under another condition."""
    return Trial(
        remedy=remedy.id,
        summary=remedy.summary,
        outcome=Outcome.NOT_TRIED,
        reason=reason,
        safe=remedy.safe and not condition,
        diagnostic=Diagnostic(effects=0) if condition else None,
    )


def _objections(remedy: Remedy, run: Run, after: RunSummary, baselines: Baselines) -> Iterator[str]:
    """What speaks against calling the run cured, the plainest first."""
    analysis, ending = analysis_of(run.trace), ending_of(run)
    if not ending.completed:
        strict = _as_intended(remedy, run)
        yield (
            f"{ending.words}. A cast would have hidden it"
            if strict
            else _beside_before(ending.words, run, baselines.raised)
        )
    if after.steps_completed < after.steps_planned:
        yield f"only {after.steps_completed}/{after.steps_planned} steps completed"
    before = {f.id for f in baselines.findings}
    errors = {f.id for f in baselines.findings if f.severity is not Severity.INFO}
    for finding in analysis.findings:
        if finding.id in errors or finding.severity is Severity.ERROR:
            yield f"{finding.id} {'recurs' if finding.id in before else 'occurs'}"
    bad = analysis.first_nonfinite
    if bad is not None:
        yield f"{bad[1].fqn} is not finite in step {bad[0].step}"
    for metric in analysis.nonfinite_metrics:
        yield f"{', '.join(metric.nonfinite)} not finite in step {metric.step}"
    if after.output_error is not None and after.output_error > WRONG_OUTPUT:
        yield f"completes, but its outputs are wrong: relative error {after.output_error:.2g} against float32"


def _beside_before(ended: str, run: Run, before: Raised | None) -> str:
    """How a run ended, in words, beside what the untreated run raised: the same or another error, in the same or another place."""
    raised = analysis_of(run.trace).raised
    if before is None or raised is None or run.died:
        return ended
    uncalled = [correction.id for correction in run.trace.uncalled_corrections]
    idle = f"; nothing had called {' or '.join(uncalled)} by then" if uncalled else ""
    place = _beside_place(raised, before)
    if (raised.type, raised.message) != (before.type, before.message):
        return f"fails {place}with another error: {ended}{idle}"
    moved = (raised.step, raised.phase) != (before.step, before.phase)
    when = f", now in step {raised.step} ({raised.phase})" if moved else ""
    return f"fails {place}with the same error{when}{idle}"


def _beside_place(raised: Raised, before: Raised) -> str:
    """Where it failed, and whether the untreated run failed there too; empty where that is not known."""
    line = failing_line(raised)
    if line is None:
        return ""
    alike = line == failing_line(before) and (raised.op == before.op or None in (raised.op, before.op))
    what = f"{raised.op} at {line}" if raised.op else line
    return f"at {'the same' if alike else 'another'} {'operation' if raised.op else 'line'}, {what}, "


def _ratio_base(baselines: Baselines) -> RunSummary | None:
    """The run to compare costs with: the untreated one if it lived long enough to say anything, else the reference."""
    if baselines.before.steps_completed >= MIN_STEPS_FOR_RATIO:
        return baselines.before
    return baselines.reference[0] if baselines.reference else None


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def expectation_on(expect: Expectation, device: str) -> Expectation:
    """What is expected on ``device`` (``cpu``, ``cuda:0``): nothing, if the expectation is for another one."""
    elsewhere = expect.only_on is not None and not device.startswith(expect.only_on)
    return Expectation() if elsewhere else expect


def is_met(expect: Expectation, findings: Sequence[Finding], trials: Sequence[Trial]) -> tuple[bool, str]:
    """Whether everything came true, and what happened in words. The findings expected are the first ones, in order."""
    wrong = [*_about_findings(expect, findings), *_about_trials(expect, trials)]
    if wrong:
        return False, "; ".join(wrong) + "."
    if not expect.findings:
        return True, "healthy."
    fixes = ", ".join(expect.cured_by)
    return True, f"fails with {', '.join(expect.findings)}{f', fixed by {fixes}' if fixes else ''}."


def _about_findings(expect: Expectation, findings: Sequence[Finding]) -> Iterator[str]:
    found = [f.id for f in findings if f.severity is not Severity.INFO]
    expected = [canonical(name) for name in expect.findings]
    if found[: len(expected)] != expected or (found and not expected):
        wanted = f"findings {', '.join(expect.findings)}" if expect.findings else "no findings"
        yield f"expected {wanted}, got {', '.join(found) or 'none'}"


def _about_trials(expect: Expectation, trials: Sequence[Trial]) -> Iterator[str]:
    outcomes = {trial.remedy: trial.outcome for trial in trials}
    wanted = dict.fromkeys(expect.cured_by, Outcome.FIXED) | dict.fromkeys(expect.not_cured_by, Outcome.NOT_FIXED)
    for name, outcome in wanted.items():
        if outcomes.get(name) is not outcome:
            yield f"{name} should be {outcome.value}, is {outcomes[name].value if name in outcomes else 'unknown'}"
