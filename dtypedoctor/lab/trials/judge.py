"""Decides whether a remedy has fixed a run, whether a scenario showed what it says it shows, and what fixes and ablations prove."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dtypedoctor.analysis import analysis_of, ending_of
from dtypedoctor.diagnosis.registry import canonical, spec_of
from dtypedoctor.diagnosis.rule import Confidence, Finding, Severity
from dtypedoctor.diagnosis.wording import failing_line
from dtypedoctor.examination.results import WRONG_OUTPUT, Bearing, Diagnostic, Outcome, RunSummary, Trial, not_tried
from dtypedoctor.lab.scenarios.model import Expectation, Scenario
from dtypedoctor.lab.trials.summary import parity, summarise_against
from dtypedoctor.plugins import Remedy
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.events import Condition, Correction, Raised
from dtypedoctor.trace.model import Trace

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
    after = summarise_against(remedy.id, run, scenario, baselines.twin)
    remains = _remaining(baselines.findings, run.trace)
    reason = next(_objections(remedy, run, after, baselines, remains), "")
    base = _ratio_base(baselines)
    last = {c.id: c for c in run.trace.all(Correction)}
    probe = diagnostic(remedy.id, scenario, run.trace, baselines.failed, passes=not reason)
    return Trial(
        remedy=remedy.id,
        summary=remedy.summary,
        outcome=Outcome.NOT_FIXED if reason else Outcome.FIXED,
        reason=reason or _why_fixed(run.trace, baselines.findings, remains),
        safe=remedy.safe and probe is None,
        run=after,
        parity=parity(run.trace, baselines.reference[1]) if baselines.reference else None,
        rescued_elements=sum(c.rescued for c in last.values()) if last else None,
        clamped_elements=sum(c.clamped for c in last.values()) if last else None,
        # The steps of a script differ in what is measured and replayed in them, so their times do not compare.
        step_time_ratio=None if run.foreign else _ratio(after.step_time, base.step_time if base else None),
        peak_memory_ratio=_ratio(after.peak_memory, base.peak_memory if base else None),
        ratio_base=base.label if base else None,
        output_error=after.output_error,
        as_intended=_as_intended(remedy, run),
        never_reached=_never_reached(run, baselines.raised),
        remains=() if reason else remains,
        diagnostic=probe,
    )


def _remaining(before: Sequence[Finding], after: Trace) -> tuple[str, ...]:
    """Ids of the warnings that are found in ``after``, new ones too, but for the first finding of the untreated run."""
    first = next((finding.id for finding in before if finding.severity is not Severity.INFO), None)
    warnings = (f.id for f in analysis_of(after).findings if f.severity is Severity.WARNING and f.id != first)
    return tuple(dict.fromkeys(warnings))


def _why_fixed(trace: Trace, before: Sequence[Finding], remains: Sequence[str]) -> str:
    if remains:
        first = before[0].id if before else "the failure"
        known = {finding.id for finding in before}
        found = ", ".join(name if name in known else f"{name} (new)" for name in remains)
        return f"{first} does not recur; found in this run: {found}"
    return f"all steps completed, the finding does not recur, {_finite(trace)}"


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


def _objections(
    remedy: Remedy, run: Run, after: RunSummary, baselines: Baselines, remains: Sequence[str]
) -> Iterator[str]:
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
    if not after.steps_planned and after.steps_completed < baselines.before.steps_completed:
        yield f"only {after.steps_completed} of the {baselines.before.steps_completed} steps that the run without it completed"
    before = {f.id for f in baselines.findings}
    errors = {f.id for f in baselines.findings if f.severity is not Severity.INFO}
    for finding in analysis.findings:
        if finding.id in remains and finding.severity is Severity.WARNING:
            continue
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


def expected(
    expect: Expectation, before: Run, findings: Sequence[Finding], trials: Sequence[Trial] | None
) -> tuple[bool | None, str]:
    """Whether a scenario came out as it says, and that in a sentence; None where that is not judged: without trials, or where nothing is expected."""
    environment = before.trace.environment
    expect = expectation_on(expect, str(environment.get("device", "")))
    if unseen := unseen_release(expect, environment.get("versions") or {}):
        return None, unseen
    if not expect.findings or trials is None:
        return None, ""
    return is_met(expect, findings, trials)


def expectation_on(expect: Expectation, device: str) -> Expectation:
    """What is expected on ``device`` (``cpu``, ``cuda:0``): nothing, if the expectation is for another one."""
    elsewhere = expect.only_on is not None and not device.startswith(expect.only_on)
    return Expectation() if elsewhere else expect


def unseen_release(expect: Expectation, versions: Mapping[str, str]) -> str:
    """Return the installed release, and the bound, with which the expectation was never seen to hold; empty if there is none.

    Libraries change what a scenario shows: what was seen with one release is no claim about another.
    """
    for bound in expect.seen_with:
        name, relation, limit = re.split("(<|>=)", bound)
        installed = versions.get(name)
        if installed is not None and (_release(installed) < _release(limit)) != (relation == "<"):
            return f"{name} {installed} is installed, this was seen with {bound}."
    return ""


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


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
    tried = {trial.remedy: trial for trial in trials}
    wanted = dict.fromkeys(expect.cured_by, Outcome.FIXED) | dict.fromkeys(expect.not_cured_by, Outcome.NOT_FIXED)
    for name, outcome in wanted.items():
        if name not in tried:
            yield f"{name} should be {outcome.value}, is unknown"
        elif tried[name].outcome is not outcome:
            why = f" ({tried[name].reason})" if tried[name].reason else ""
            yield f"{name} should be {outcome.value}, is {tried[name].outcome.value}{why}"


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
        f"With {proving.remedy} ({proving.summary}) the run completes{_steps(proving.run)}; the failure does not recur.",
        *(f"The same with {t.remedy} ({t.summary}): the run completes{_steps(t.run)}." for t in others if t.run),
    ]
    proof = f"changing only {proving.remedy} ({proving.summary}) makes the failure disappear"
    return replace(finding, confidence=Confidence.PROVEN, proven_by=proof, evidence=(*finding.evidence, *said))


def _steps(run: RunSummary) -> str:
    """The steps of a run, behind a space; how many there should have been is known of scenarios, and not of a script, which may have none."""
    if run.steps_planned:
        return f" {run.steps_completed}/{run.steps_planned} steps"
    if not run.steps_completed:
        return ""
    return f" {run.steps_completed} step{'' if run.steps_completed == 1 else 's'}"
