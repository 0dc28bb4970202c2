"""What is not what it is taken for: a generator's log-probabilities, and a patch."""

from collections import Counter
from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding, Severity
from dtypedoctor.diagnosis.mismatch.census import HALF
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.wording import listed, short
from dtypedoctor.trace.events import Correction, Flow, Metric
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trace.records.silent import FirstRatio, Twins, Unpatched

GAP = 1e-3
"""Largest difference of log-probabilities that is taken for float32's own rounding."""
RATIO_OFF = 1e-3
RATIOS = ("sampling/importance_sampling_ratio/mean", "sampling/sampling_logp_difference/max")
"""What TRL reports of the ratio between trainer and generator, and of their log-probabilities' difference."""


def detect_gap(trace: Trace) -> Iterator[Finding]:
    """Generator and trainer that disagree about the same tokens although their weights are the same."""
    twins = [o for o in trace.observed(Twins) if o.what.largest_gap > GAP and not o.what.dropout]
    if twins:
        what = twins[0].what
        said = Statement(
            id="logprob-gap",
            severity=Severity.WARNING,
            confidence=Confidence.LIKELY,
            summary=(
                f"With the same weights the {what.generator_dtype} generator and the {what.trainer_dtype} trainer give "
                f"log-probabilities up to {what.largest_gap:.2g} apart."
            ),
            cause=(
                "The ratio of the two policies is meant to be 1 while their weights are equal. Here it also compares two ways of "
                "computing, so updates are clipped and weighted by rounding errors."
            ),
            evidence=(
                (
                    f"{what.rows} distributions over {what.choices} choices for the same input: largest gap "
                    f"{what.largest_gap:.3g}, mean {what.mean_gap:.3g}."
                ),
                f"The generator's parameters equal the trainer's, rounded to {what.generator_dtype}.",
                "The trainer drops nothing at random, so that is not the reason.",
            ),
        )
        yield located(said, phase=twins[0].phase, step=twins[0].step, dtype=what.generator_dtype)
        return
    found = tuple(_ratio_off(trace))
    yield from found or _reported(trace)


def _ratio_off(trace: Trace) -> Iterator[Finding]:
    """A clipped ratio that is not 1 before the first optimizer step, in a program that computes in half precision somewhere."""
    ways = _ways_of_computing(trace)
    for seen in trace.observed(FirstRatio):
        what = seen.what
        if what.largest_gap <= GAP or what.random or not ways:
            continue
        low, high = what.bounds
        said = Statement(
            id="logprob-gap",
            severity=Severity.WARNING,
            confidence=Confidence.LIKELY if len(ways) > 1 else Confidence.POSSIBLE,
            summary=(
                f"Before the first optimizer step, log-probabilities of sampler and trainer are up to {what.largest_gap:.2g} apart: "
                f"the ratio of {what.off:,} of {what.elements:,} actions is not 1."
            ),
            cause=(
                "No weight has been trained yet, so trainer and sampler are the same policy and their ratio is meant to be 1. What it is "
                "off by is the difference between two ways of computing, and updates are clipped and weighted by it."
            ),
            evidence=(
                (
                    f"exp(new - old) before it is clipped to {low:g} to {high:g}: largest difference of log-probabilities "
                    f"{what.largest_gap:.3g}, mean {what.mean_gap:.3g}; {what.clipped:,} ratios are beyond the bounds."
                ),
                f"The policy is computed as {listed(ways)}.",
                "No module drops elements at random or normalizes by its batch while it trains, so that is not the reason.",
            ),
        )
        yield located(said, phase="forward", step=seen.step)


def _ways_of_computing(trace: Trace) -> list[str]:
    """The dtypes and autocast regions in which outermost modules ran; empty where none is in half precision."""
    flows = [flow for flow in trace.all(Flow) if not flow.fqn and flow.outputs]
    ways = [f"{flow.outputs[0]} in {flow.autocast} autocast" if flow.autocast else flow.outputs[0] for flow in flows]
    halves = any(
        flow.autocast in HALF or {*flow.inputs, *flow.outputs, *flow.weights} & HALF for flow in trace.all(Flow)
    )
    return list(dict.fromkeys(ways)) if halves else []


def _reported(trace: Trace) -> Iterator[Finding]:
    """The trainer's own measure in the first step, before any update has been made."""
    first = next((m for m in trace.all(Metric) if m.step == 1), None)
    if first is None:
        return
    ratio, difference = (first.values.get(name) for name in RATIOS)
    if (ratio is None or abs(ratio - 1.0) <= RATIO_OFF) and (difference is None or difference <= GAP):
        return
    told = [f"{name} is {first.values[name]:.6g} in step 1." for name in RATIOS if name in first.values]
    said = Statement(
        id="logprob-gap",
        severity=Severity.WARNING,
        confidence=Confidence.POSSIBLE,
        summary="The trainer reports other log-probabilities than the generator in the first step, before any update.",
        cause="Before the first update both have the same weights, so the ratio of their probabilities should be 1.",
        evidence=tuple(told),
    )
    yield located(said, phase="generate", step=1)


def detect_missing_patches(trace: Trace) -> Iterator[Finding]:
    """Corrections that were asked for and do not run, and originals kept for a patch that was not made."""
    for seen in trace.observed(Unpatched):
        what = seen.what
        yield _not_applied(
            fqn=seen.fqn,
            source=what.source,
            summary=f"A patch of {what.class_}.{what.method} was prepared and is not in place.",
            evidence=(
                (
                    f"{what.class_}.{what.attribute} keeps the original, and {what.class_}.{what.method} still "
                    f"runs the same code object, {what.source}."
                ),
            ),
        )
    last = {record.id: record for record in trace.all(Correction)}
    for record in last.values():
        if not record.installed:
            yield _not_applied(
                fqn=None,
                source=None,
                summary=f"The correction {record.id} was asked for and is not in place: {record.reason}",
                evidence=(f"Installing it failed: {record.reason}",),
            )
        elif record in never_called(trace):
            yield _not_applied(
                fqn=None,
                source=None,
                summary=f"The correction {record.id} is installed in {record.target}, and nothing has called it.",
                evidence=(f"It was called 0 times by the end of the run ({record.proof}).",),
            )


def never_called(trace: Trace) -> tuple[Correction, ...]:
    """The last records of the corrections that were installed and that nothing had called by the end of the run."""
    if trace.end is None:
        return ()
    records = trace.all(Correction)
    last = {record.id: record for record in records}
    counted = Counter(record.id for record in records)
    return tuple(r for r in last.values() if r.installed and r.hits == 0 and counted[r.id] > 1)


def _not_applied(*, fqn: str | None, source: str | None, summary: str, evidence: tuple[str, ...]) -> Finding:
    said = Statement(
        id="patch-not-applied",
        severity=Severity.WARNING,
        proven_by="the code that runs was looked at: it is not the patch, or nothing has called it",
        summary=summary,
        cause=(
            "Whoever patches a method may find that it has changed and leave it as it is; nobody notices unless the code "
            f"object that runs is looked at. What the patch was meant to cure in {short(fqn)} is not cured."
        ),
        evidence=evidence,
    )
    return located(said, phase="static", fqn=fqn, source=source)
