"""``logprob-gap``: a generator and a trainer that disagree about the same weights."""

from collections.abc import Iterator, Mapping

from dtypedoctor.diagnosis.rule import SILENT, Confidence, Finding, FindingSpec, Rule, Severity
from dtypedoctor.diagnosis.wording import listed
from dtypedoctor.dtypes import HALF
from dtypedoctor.rules import Statement, make_finding
from dtypedoctor.trace.events import Flow, Metric
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import FirstRatio, Twins

SPEC = FindingSpec(
    id="logprob-gap",
    title="Generator and trainer give different log-probabilities for the same weights",
    family=SILENT,
    severity=Severity.WARNING,
    aliases=("train-inference-mismatch",),
    references=("https://github.com/huggingface/trl/pull/3867", "https://github.com/sail-sg/Precision-RL/issues/10"),
    do_this="Compute both log-probabilities in one dtype, in and out of autocast alike.",
    edits=("bfloat16-to-float32",),
)

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
        statement = Statement(
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
        yield make_finding(statement, phase=twins[0].phase, step=twins[0].step, dtype=what.generator_dtype)
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
        statement = Statement(
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
        yield make_finding(statement, phase="forward", step=seen.step)


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
    first = next((metric.values for metric in trace.all(Metric) if metric.step == 1), None)
    if first is None or not _is_off(first):
        return
    statement = Statement(
        id="logprob-gap",
        severity=Severity.WARNING,
        confidence=Confidence.POSSIBLE,
        summary="The trainer reports other log-probabilities than the generator in the first step, before any update.",
        cause="Before the first update both have the same weights, so the ratio of their probabilities should be 1.",
        evidence=tuple(f"{name} is {first[name]:.6g} in step 1." for name in RATIOS if name in first),
    )
    yield make_finding(statement, phase="generate", step=1)


def _is_off(reported: Mapping[str, float]) -> bool:
    """Whether the trainer's ratio is not 1, or its difference of log-probabilities not 0."""
    ratio, difference = (reported.get(name) for name in RATIOS)
    return (ratio is not None and abs(ratio - 1.0) > RATIO_OFF) or (difference is not None and difference > GAP)


RULES = (Rule(name="logprob-gap", specs=(SPEC,), detect=detect_gap),)
