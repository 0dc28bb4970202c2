"""Compares runs in numbers; decides whether a remedy has fixed a run, whether a scenario showed what it says it shows, and what fixes and ablations prove."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, expm1, fsum, sqrt
from statistics import median

from dtypedoctor.analysis import analysis_of, ending_of
from dtypedoctor.diagnosis import canonical, spec_of
from dtypedoctor.diagnosis.rule import Confidence, Finding, Severity
from dtypedoctor.diagnosis.wording import failing_line
from dtypedoctor.examination.processes import COMPARED, summarise
from dtypedoctor.examination.results import (
    WRONG_OUTPUT,
    Bearing,
    Diagnostic,
    Observer,
    Outcome,
    Parity,
    RunSummary,
    Trial,
    not_tried,
)
from dtypedoctor.lab.scenarios.model import Expectation, Scenario
from dtypedoctor.plugins import Remedy
from dtypedoctor.redaction.messages import without_volatile
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.events import Condition, Correction, Metric, ProbeLogProbs, Raised, Resources
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
        # A correction that finds nothing to correct does not apply; any other reason is trouble with installing it
        kind, _, why = refused.reason.partition(": ")
        could_not = f"the correction could not be installed: {refused.reason}"
        return not_tried(remedy, f"it does not apply here: {why}" if kind == MISMATCH else could_not)
    idle = without_effect(remedy.id, scenario, run.trace)
    if idle:
        return not_tried(remedy, idle, condition=True)
    after = summarise_against(remedy.id, run, scenario, baselines.twin)
    remains = _remaining(baselines.findings, run.trace)
    reason = next(_objections(remedy, run, after, baselines, remains), "")
    # Costs are compared with the untreated run if it lived long enough to say anything, else with the reference
    base: RunSummary | None = baselines.before
    if baselines.before.steps_completed < MIN_STEPS_FOR_RATIO:
        base = baselines.reference[0] if baselines.reference else None
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
    bad = any(not sample.finite for sample in trace.samples)
    finite = "no inf or NaN that matters" if bad else "everything measured is finite"
    return f"all steps completed, the finding does not recur, {finite}"


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


def summarise_against(label: str, run: Run, scenario: Scenario, twin: Trace | None) -> RunSummary:
    """The row of ``run`` in the before/after table; ``twin`` is the trace of its float32 twin, where there is one."""
    steps = sum(getattr(step.workload, "steps", 0) for step in scenario.steps)
    models = sum(step.model is not None for step in scenario.steps)
    error = output_error(run.trace, twin, models) if twin is not None else None
    return replace(summarise(label, run, steps), output_error=error)


def output_error(run: Trace, twin: Trace, models: int) -> float | None:
    """The largest relative error over the models of a run, each taken before its first training step.

    For one model it is the root mean square of the differences between the two runs' token log-probabilities on the probe
    batch, over the standard deviation of the twin's: 0 for equal outputs, about 1 for outputs that have nothing to do with
    each other.

    Args:
        run: the run to judge.
        twin: that of the float32 twin.
        models: number of models that the run was to build; if the twin has more, the run was to build its last ones.

    Returns:
        None where a model gave no finite outputs before its first step.
    """
    ours, theirs = _first_outputs(run), _first_outputs(twin)
    if not models or len(ours) != models or len(theirs) < models:
        return None
    errors = [_relative(mine, exact) for mine, exact in zip(ours, theirs[-models:], strict=True)]
    known = [error for error in errors if error is not None]
    return max(known) if len(known) == len(errors) else None


def _first_outputs(trace: Trace) -> list[list[float | None]]:
    return [record.values for record in trace.all(ProbeLogProbs) if record.untrained]


def _relative(values: list[float | None], exact: list[float | None]) -> float | None:
    pairs = [(a, b) for a, b in zip(values, exact, strict=False) if a is not None and b is not None]
    if len(pairs) < max(len(values), len(exact)) or not pairs:
        return None
    mean = fsum(b for _, b in pairs) / len(pairs)
    spread = sqrt(fsum((b - mean) ** 2 for _, b in pairs))
    difference = sqrt(fsum((a - b) ** 2 for a, b in pairs))
    return difference / spread if spread else None


REWARD_TOLERANCE = 0.01
"""Mean rewards closer than this count as equal."""


def parity(run: Trace, reference: Trace) -> Parity | None:
    """Compares the probe batch's token log-probabilities step by step; None where no step can be compared."""
    ours = {p.step: p.values for p in run.all(ProbeLogProbs) if not p.untrained}
    theirs = {p.step: p.values for p in reference.all(ProbeLogProbs) if not p.untrained}
    shared = sorted(ours.keys() & theirs.keys())
    per_step = [kl for step in shared if (kl := _mean_kl(ours[step], theirs[step])) is not None]
    if not per_step:
        return None
    ordered = sorted(per_step)
    position = 0.95 * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return Parity(
        median_kl=median(per_step),
        p95_kl=(ordered[low] + (ordered[high] - ordered[low]) * (position - low)),
        max_kl=max(per_step),
        total_kl=sum(per_step),
        steps_compared=len(per_step),
        reward_equal_steps=_equal_rewards(run, reference),
    )


def _mean_kl(ours: list[float | None], theirs: list[float | None]) -> float | None:
    """Mean of exp(d) - d - 1 over the tokens; expm1 keeps small differences, which exp would round away."""
    gaps = [t - o for o, t in zip(ours, theirs, strict=False) if o is not None and t is not None]
    if not gaps or len(gaps) < len(ours):
        return None
    return sum(expm1(d) - d if d < 700 else exp(700) for d in gaps) / len(gaps)


def _equal_rewards(run: Trace, reference: Trace) -> int | None:
    ours = {m.step: m.values["reward"] for m in run.all(Metric) if "reward" in m.values}
    theirs = {m.step: m.values["reward"] for m in reference.all(Metric) if "reward" in m.values}
    if not ours or not theirs:
        return None
    return sum(abs(ours[s] - theirs[s]) < REWARD_TOLERANCE for s in ours.keys() & theirs.keys())


_SET = re.compile(r"\{([^{}:]*)\}")
"""How Python prints a set, in an order of its own in each process."""


def compare_unwatched(watched: Run, unwatched: Run) -> Observer:
    """Compares losses, gradient norms and the trained parameters of a watched run and an unwatched one, bit for bit.

    Of several ranks each is compared with itself, and the worst of them counts.
    """
    if len(watched.ranks) == len(unwatched.ranks) > 1:
        each = [_compare(one, other) for one, other in zip(watched.ranks, unwatched.ranks, strict=True)]
        rank = min(range(len(each)), key=lambda number: _WORST_FIRST.index(each[number].bitwise_equal))
        everywhere = f"on each of {len(each)} ranks" if each[rank].bitwise_equal else f"on rank {rank}"
        return replace(each[rank], reason=f"{everywhere}, {each[rank].reason}")
    return _compare(watched, unwatched)


_WORST_FIRST = (False, None, True)


def _compare(watched: Run, unwatched: Run) -> Observer:
    if watched.died or unwatched.died:
        return Observer(bitwise_equal=None, reason="a worker died, so there is nothing to compare")
    end, end_unwatched = watched.trace.end, unwatched.trace.end
    if end is None or end_unwatched is None:
        return Observer(bitwise_equal=None, reason="a trace has no end")
    if end.outcome != end_unwatched.outcome:
        ours, theirs = _ending(watched, end.outcome), _ending(unwatched, end_unwatched.outcome)
        return Observer(bitwise_equal=False, reason=f"the run {ours} with instrumentation, and {theirs} without")
    if watched.trace.folded is not None or unwatched.trace.folded is not None:
        # Long runs, of which not every step is kept: the trained parameters tell
        equal = parameters_equal(watched.trace, unwatched.trace)
        if equal is None:
            return Observer(bitwise_equal=None, reason="steps of so long a run are not all kept for comparison")
        verdict = "are bitwise equal with and without instrumentation" if equal else "differ"
        return Observer(bitwise_equal=equal, reason=f"the trained parameters {verdict}")
    difference = _difference(watched, unwatched)
    if difference:
        return Observer(bitwise_equal=False, reason=difference)
    steps = len(watched.trace.all(Metric))
    if not steps:
        reason = "no step was completed, so there is nothing to compare"
        if end.outcome == "raised":
            reason = (
                "the run raises the same error with and without instrumentation, before any step has numbers to compare"
            )
        if watched.foreign:
            reason += "; the script ended in the same way"
        return Observer(bitwise_equal=None, reason=reason, same_error=end.outcome == "raised")
    trained = "the gradients and parameters after each of them" if watched.foreign else "the trained parameters"
    return Observer(
        bitwise_equal=True,
        reason=f"{_compared(watched)} of {steps} step(s) and {trained} are bitwise equal with and without instrumentation",
        same_error=end.outcome == "raised",
    )


def parameters_equal(a: Trace, b: Trace) -> bool | None:
    """Whether the checksums over the trained parameters are the same; None where one is not there."""
    ours, theirs = a.last(Resources), b.last(Resources)
    if ours is None or theirs is None or ours.checksum is None or theirs.checksum is None:
        return None
    return ours.checksum == theirs.checksum


def _compared(run: Run) -> str:
    """What was there to compare, e.g. ``loss, grad_norm``."""
    metrics = run.trace.all(Metric)
    names = [name for name in COMPARED if any(name in m.values or name in m.nonfinite for m in metrics)]
    return ", ".join(names) or "the number"


def _ending(run: Run, outcome: str) -> str:
    raised = analysis_of(run.trace).uncaught
    if outcome == "raised" and raised is not None:
        return f"raises {raised.type} ({(raised.message.splitlines() or [''])[0][:160]})"
    return {"completed": "completes", "raised": "raises"}.get(outcome, outcome)


def _text(run: Run) -> str:
    """What ended the run, without what differs from process to process; empty where nothing was raised."""
    raised = analysis_of(run.trace).uncaught
    if raised is None:
        return ""
    said = raised.message.split("from user code:", 1)[0]  # Dynamo quotes torch's own lines there, which hooks change
    process = run.trace.header.pid if run.trace.header is not None else 0
    text = without_volatile(said, process)
    return f"{raised.type}: {_SET.sub(lambda printed: ', '.join(sorted(printed[1].split(', '))), text)}"


def _difference(watched: Run, unwatched: Run) -> str:
    """In what the two runs differ first; empty where they do not."""
    metrics = _metric_difference(watched.trace.all(Metric), unwatched.trace.all(Metric))
    if metrics:
        return metrics
    exceptions = {_text(run) for run in (watched, unwatched)} - {""}
    if len(exceptions) > 1:
        return "the exceptions differ"
    # Which rank torchrun ends before it has ended by itself is a race, and no difference
    by_launcher = watched.exit.ended_by_launcher or unwatched.exit.ended_by_launcher
    if watched.exit.code != unwatched.exit.code and not by_launcher:
        return f"the script {watched.exit.describe()} with instrumentation, and {unwatched.exit.describe()} without"
    mine, yours = watched.trace.last(Resources), unwatched.trace.last(Resources)
    is_other = mine is not None and yours is not None and mine.checksum != yours.checksum
    return "the trained parameters differ" if is_other else ""


def _metric_difference(ours: Sequence[Metric], theirs: Sequence[Metric]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} steps with instrumentation, {len(theirs)} without"
    for one, other in zip(ours, theirs, strict=True):
        for name in COMPARED:
            mine, yours = one.values.get(name), other.values.get(name)
            if mine != yours:
                return f"{name} of step {one.step} is {mine} with instrumentation, {yours} without"
    return ""
