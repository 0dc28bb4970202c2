"""``logprob-gap``: a generator and a trainer that disagree about the same weights."""

from collections.abc import Iterator, Mapping

from dtypedoctor.diagnosis.rule import SILENT, Confidence, Finding, FindingSpec, Rule, Severity
from dtypedoctor.diagnosis.wording import at_line, listed
from dtypedoctor.dtypes import HALF
from dtypedoctor.rules import Statement, make_finding
from dtypedoctor.trace.events import Flow, Metric, Observed
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import DecodedTokens, FirstRatio, RoundedLogprobs, Twins


def _of_decoding(finding: Finding) -> str:
    """What to change where decoding goes another way, which no dtype mends."""
    if finding.phase != "generate" or finding.dtype is None:
        return ""
    if finding.proven_by is None:
        return (
            "Find what decoding keeps from step to step (casts or merged copies of weights, a cache) and make it anew after each optimizer step, or generate by the "
            "code that the model is trained with."
        )
    where = at_line(finding.source)
    return f"Make the copies{where} anew after each optimizer step, or cast the weights at each use."


SPEC = FindingSpec(
    id="logprob-gap",
    title="Generator and trainer give different log-probabilities for the same weights",
    family=SILENT,
    severity=Severity.WARNING,
    aliases=("train-inference-mismatch",),
    references=("https://github.com/huggingface/trl/pull/3867", "https://github.com/sail-sg/Precision-RL/issues/10"),
    do_this="Compute both log-probabilities in one dtype, in and out of autocast alike, and keep them in float32.",
    instead=_of_decoding,
    edits=("in-wider-dtype", "bfloat16-to-float32"),
)

GAP = 1e-3
"""Largest difference of log-probabilities that is taken for float32's own rounding."""
SAME = 1e-5
"""Largest difference that float32 makes by itself between two models that compute the same."""
WHAT_IS_LEFT = 0.25
"""Share of the difference that may be left where both have computed in one dtype."""
RATIO_OFF = 1e-3
RATIOS = ("sampling/importance_sampling_ratio/mean", "sampling/sampling_logp_difference/max")
"""What TRL reports of the ratio between trainer and generator, and of their log-probabilities' difference."""


def detect_gap(trace: Trace) -> Iterator[Finding]:
    """Two ways of computing that disagree about the same tokens although the weights are the same; log-probabilities that are rounded in between."""
    twins = _of_two_models(trace)
    if twins is not None:
        yield twins
    rounded = tuple(_of_rounded(trace, explained=twins is not None))
    yield from rounded
    decoded = [_decoded(seen) for seen in trace.observed(DecodedTokens)] if twins is None else []
    yield from decoded[:1]
    if twins is None and not rounded and not decoded:
        yield from tuple(_ratio_off(trace)) or _reported(trace)


def _of_rounded(trace: Trace, *, explained: bool) -> Iterator[Finding]:
    """The worst rounding in between; ``explained`` is what a model computes in its own dtype, where that of another is the finding."""
    seen = [seen for seen in trace.observed(RoundedLogprobs) if not (explained and seen.what.how == "computed")]
    if seen:
        yield _rounded(max(seen, key=lambda each: each.what.error))


def _of_two_models(trace: Trace) -> Finding | None:
    """The policy and a model of the same weights in another dtype: its reference, or what generates for it."""
    for seen in trace.observed(Twins):
        what = seen.what
        if what.moved > SAME and what.apart <= max(WHAT_IS_LEFT * what.largest_gap, SAME):
            return _twins(seen)
    return None


def _twins(seen: Observed[Twins]) -> Finding:
    what = seen.what
    ours, theirs = (
        f"{dtype} in {region} autocast" if region else dtype
        for dtype, region in (
            (what.trainer_dtype, what.trainer_autocast),
            (what.generator_dtype, what.generator_autocast),
        )
    )
    tokens = "tokens" if what.choices == 1 else f"{what.choices:,} choices, those above 0.1%"
    statement = Statement(
        id="logprob-gap",
        severity=Severity.WARNING if what.largest_gap > GAP else Severity.INFO,
        confidence=Confidence.LIKELY,
        proven_by=f"called again in one dtype, the two are within {what.apart:.2g} of each other",
        summary=(
            f"The trained model ({ours}) and its reference or generator ({theirs}) have the same weights, but their log-probabilities of the same "
            f"tokens differ by up to {what.largest_gap:.2g}."
        ),
        cause=(
            "While the weights are equal, the ratio and the KL divergence of the two are meant to be 1 and 0. Here they also compare two dtypes, so the "
            "loss, its rewards and its clipping contain rounding errors, in every step."
        ),
        evidence=(
            f"{what.rows:,} log-probabilities of the same {tokens}: largest difference {what.largest_gap:.3g}, mean {what.mean_gap:.3g}, without dropout.",
            f"The wider of the two, called again in {_narrow(what)}: its log-probabilities move by up to {what.moved:.3g}.",
            "The weights of one equal those of the other, rounded to the narrower dtype.",
        ),
    )
    return make_finding(statement, phase=seen.phase, step=seen.step, dtype=_narrow(what))


def _decoded(seen: Observed[DecodedTokens]) -> Finding:
    what = seen.what
    compared = (
        f"{what.tokens:,} tokens, decoded again one at a time with the same weights: mean difference of their log-probabilities {what.mean_gap:.3g}, "
        f"largest {what.largest_gap:.3g}."
    )
    evidence = [compared]
    if what.rounding is not None:
        evidence.append(
            f"Rounding makes {what.rounding:.2g} of it: that is how far the call on all tokens is from the same call in float32."
        )
    copies = what.copies
    proof = None
    why = (
        "Rounding does not explain the difference. Decoding one token at a time goes another way than a call on all tokens: other kernels, a cache, copies "
        "of weights that are not updated with the weights."
    )
    if copies is not None:
        of = f"`{copies.attribute}` of {copies.module}{f', stored at {copies.stored_at}' if copies.stored_at else ''}"
        evidence.append(
            f"Of the tensors kept beside the weights, {copies.number:,} differ from the weight of their shape; the first is {of}."
        )
        proof = f"the tokens of one text, decoded again, are {copies.before:.2g} off on average, and {copies.after:.2g} with the copies made anew"
        why = f"Decoding multiplies with copies of weights that an optimizer step does not update: {of}."
    statement = Statement(
        id="logprob-gap",
        severity=Severity.WARNING,
        confidence=Confidence.POSSIBLE if what.rounding is None else Confidence.LIKELY,
        proven_by=proof,
        summary=(
            f"The model generates with {'stale copies of its weights' if copies is not None else 'other log-probabilities than it is trained with'}: "
            f"{'log-probabilities' if copies is not None else 'those'} of the same tokens differ by {what.mean_gap:.2g} on average in step {seen.step}, with the same weights."
        ),
        cause=f"{why} The model is trained on texts that another policy has sampled.",
        evidence=tuple(evidence),
    )
    return make_finding(
        statement,
        phase="generate",
        step=seen.step,
        fqn=copies.module if copies is not None else None,
        dtype=what.dtype,
        source=copies.stored_at if copies is not None else None,
    )


_COMPARED = {"difference": "subtracts", "quotient": "divides the exponentials of"}


def _rounded(seen: Observed[RoundedLogprobs]) -> Finding:
    what = seen.what
    whose = "both log-probabilities" if len(what.sides) > 1 else f"the {what.sides[0]} log-probabilities"
    done = {
        "cast": f"{whose} are cast to {what.dtype}{at_line(what.rounded_at)}",
        "computed": f"{whose} are computed in {what.dtype}{at_line(what.rounded_at)}",
    }.get(what.how, f"{whose} were rounded to {what.dtype}")
    moves = "moves" if what.measured else "can move"
    compared = f"{what.used_at or 'the loss'} compares them: that {moves} their difference by up to {what.error:.2g}."
    proof = (
        f"with the values before the rounding, the differences move by up to {what.error:.2g}"
        if what.measured
        else None
    )
    if what.use == "divergence":
        compared = f"{what.used_at or 'the loss'} compares the distributions: rounding is {what.error:.2g} of a divergence of {what.largest_gap:.2g} per token."
        proof = None
    statement = Statement(
        id="logprob-gap",
        severity=Severity.WARNING if what.error > GAP else Severity.INFO,
        confidence=Confidence.LIKELY,
        proven_by=proof,
        summary=f"{done[:1].upper()}{done[1:]}, and {compared}",
        cause=(
            f"{what.dtype} keeps few digits of a log-probability. The ratio exp(new - old), its clipping, the KL divergence and the rewards contain the rounding error, in "
            "every step, although every value is finite."
        ),
        evidence=tuple(_evidence_of_rounding(what)),
    )  # fmt: skip
    source = what.rounded_at or what.used_at
    return make_finding(statement, phase=seen.phase, step=seen.step, dtype=what.dtype, source=source)


def _evidence_of_rounding(what: RoundedLogprobs) -> Iterator[str]:
    if what.use == "divergence":
        yield (
            f"{what.elements:,} pairs of distributions: their KL divergence is {what.largest_gap:.3g} on average. The logarithms of the sums of their probabilities, which are "
            f"0 without rounding, are {what.mean_error:.2g} off, together and on average, and the divergence by as much; the most is {what.largest:.2g}."
        )
        return
    yield (
        f"{what.used_at or 'The loss'} {_COMPARED[what.use]} {what.elements:,} log-probabilities of the same tokens: magnitudes up to {what.largest:.3g}, "
        f"differences up to {what.largest_gap:.3g}."
    )
    if what.measured:
        yield f"Computed again with the values before the rounding, the differences move by up to {what.error:.2g}, by {what.mean_error:.2g} on average."
    else:
        yield f"The values before were not seen: {what.dtype} rounds log-probabilities of this magnitude by up to {what.error:.2g}, half a step each."
    if what.how == "given":
        seen = (
            f"Log-probabilities are cast to it{at_line(what.rounded_at)}."
            if what.rounded_at
            else "Where they were rounded was not seen."
        )
        yield f"Each value is exact in {what.dtype}: they come from a file, a dataset, a buffer or a module. {seen}"


def _narrow(what: Twins) -> str:
    """The dtype of the one that is in half precision, of its region if both have the same weights' dtype."""
    pair = (what.generator_dtype, what.trainer_dtype)
    if pair[0] == pair[1]:
        return what.generator_autocast or what.trainer_autocast or pair[0]
    return next((dtype for dtype in pair if dtype in HALF), pair[0])


def _ratio_off(trace: Trace) -> Iterator[Finding]:
    """A ratio that is not 1 before the first optimizer step; a note where nothing computes in half precision."""
    ways = _ways_of_computing(trace)
    for seen in trace.observed(FirstRatio):
        what = seen.what
        if what.largest_gap <= GAP or what.random:
            continue
        clipped = "exp(new - old)"
        if what.bounds:
            clipped += " before it is clipped to {:g} to {:g}".format(*what.bounds)
        statement = Statement(
            id="logprob-gap",
            severity=Severity.WARNING if ways else Severity.INFO,
            confidence=Confidence.LIKELY if len(ways) > 1 else Confidence.POSSIBLE,
            summary=(
                f"Before the first optimizer step, log-probabilities of sampler and trainer are up to {what.largest_gap:.2g} apart: "
                f"the ratio of {what.off:,} of {what.elements:,} actions is not 1."
            ),
            cause=(
                "No weight has been trained yet, so trainer and sampler are the same policy and their ratio is meant to be 1. What it is "
                "off by is the difference between two ways of computing, and updates are clipped and weighted by it."
                + (
                    ""
                    if ways
                    else " It is not rounding: temperature, truncation, padding and positions, or other weights."
                )
            ),
            evidence=(
                (
                    f"{clipped}: largest difference of log-probabilities {what.largest_gap:.3g}, mean {what.mean_gap:.3g}"
                    + (f"; {what.clipped:,} ratios are beyond the bounds." if what.bounds else ".")
                ),
                f"The policy is computed as {listed(ways)}." if ways else "Nothing computes in half precision.",
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


RULES = (Rule(name="logprob-gap", priority=180, specs=(SPEC,), detect=detect_gap),)
