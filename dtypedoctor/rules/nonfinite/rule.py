"""The non-finite family: looks for the origin of the first inf or NaN that matters, and asks one judge after another what it is.

The judge that looks at what happened before the origin stands here too: magnitudes that grow from step to step diverge.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isfinite

from dtypedoctor.diagnosis.incidents import looks_like_a_mask
from dtypedoctor.diagnosis.nonfinite_origin import Origin, that_matter
from dtypedoctor.diagnosis.ops import graph_of, overload_free
from dtypedoctor.diagnosis.rule import COMPILE_AND_LOAD, NON_FINITE, OF_ANY_FINDING, Finding, FindingSpec, Rule
from dtypedoctor.diagnosis.wording import at_line, how_the_run_ended
from dtypedoctor.rules import Statement, make_finding
from dtypedoctor.rules.nonfinite.overflow import (
    FLOAT8_RANGE,
    judge_attention_scores,
    judge_backward,
    judge_float8,
    judge_masked_row,
    judge_norm_square,
    judge_overflow,
    swallowed_overflows,
)
from dtypedoctor.rules.nonfinite.undefined import (
    BEYOND_FLOAT32,
    OF_ANY_VALUES,
    growth_before,
    judge_by_module,
    judge_compiled,
    judge_constant,
    judge_domain,
    judge_given,
    judge_optimizer_step,
    judge_rounded,
    judge_unexamined,
    judge_unseen,
    judge_written,
    of_what_is_written,
    through_unseen,
)
from dtypedoctor.trace.model import Trace

ENDS = frozenset(
    {"float16-overflow", "attention-score-overflow", "norm-square-overflow", "backward-overflow", "domain-error",
     "rounds-out-of-domain", "optimizer-epsilon-underflow"}
)  # fmt: skip
"""Findings that a training which diverges may end in."""

_WHY = (
    "Each update makes the next gradient larger: the learning rate, its schedule or the initialization is too large, or gradients "
    "are not clipped."
)
_WHY_UNBOUNDED = (
    "The loss falls without bound, as an optimizer is to make it fall: what is minimized has no minimum (a wrong sign, or a term that nothing keeps in check), "
    "and no learning rate helps."
)
_WHY_AT_ONCE = (
    "One update is many times as large as the weights. The loss before it is {loss:,.3g}, its largest gradient {gradient:,.3g}: where these are too large, "
    "so is what the initial weights compute (an exponential, a missing scale); where they are not, the learning rate is, or there is no warm-up."
)


_OF_FLOAT32 = "A dtype with a wider range only ends a few steps later."
_OF_HALF = "A dtype with a wider range alone only ends a few steps later. Whether rounding drives it is not measured here: a run in float32 tells."


def _has_half(trace: Trace) -> bool:
    return any(site.dtype in ("float16", "bfloat16") for _, site in trace.measured())


def judge_divergence(trace: Trace, end: Finding) -> Finding | None:
    """The divergence that a finding is the end of, placed where it ends; None where the training did not grow before it."""
    if end.id not in ENDS or end.step is None or end.phase in ("generate", "static"):
        return None
    growth = growth_before(trace, end.step)
    if growth is None or not growth.diverges:
        return None
    first, last = (f"{largest:,.3g}" for largest in growth.gradients)
    if growth.steps > 1:
        when, why = f"in the {growth.steps} steps before step {end.step}", _WHY
        of_the_loss = f", the loss from {growth.losses[0]:,.3g} to {growth.losses[1]:,.3g}"
        gradient = f"Largest gradient: {first} in the first step, {last} in the last one before the failure."
    else:
        when, of_the_loss = "in its first update", ""
        why = _WHY_AT_ONCE.format(loss=growth.losses[0], gradient=growth.gradients[0])
        gradient = f"Largest gradient of that step: {first}."
    signed = [loss for step, loss in trace.losses.items() if step < end.step and isfinite(loss)]
    if signed and signed[-1] < min(0.0, *signed[:-1]):
        why, of_the_loss = _WHY_UNBOUNDED, f", the loss from {signed[0]:,.3g} to {signed[-1]:,.3g}"
    where = at_line(end.source)
    weights = f"{growth.weights[0]:,.3g} to {growth.weights[1]:,.3g}"
    statement = Statement(
        id="divergence",
        summary=f"The training diverges: {when} the largest weight goes from {weights}{of_the_loss}.",
        cause=f"{why} {_OF_HALF if _has_half(trace) else _OF_FLOAT32}"
        + ("" if why is _WHY_UNBOUNDED else " Lower the learning rate, warm it up, or clip gradients."),
        evidence=(
            gradient,
            f"It surfaces in step {end.step} as {end.id}{where}: {end.summary}",
            *how_the_run_ended(trace),
        ),
    )
    return make_finding(
        statement, phase=end.phase, step=end.step, fqn=end.fqn, op=end.op, dtype=end.dtype, source=end.source
    )


OPTIMIZER_EPSILON_UNDERFLOW = FindingSpec(
    id="optimizer-epsilon-underflow",
    title="The optimizer's epsilon or second moment vanishes in float16",
    family=NON_FINITE,
    references=("https://github.com/NVIDIA/apex/issues/240", "https://github.com/google-deepmind/optax/issues/1754"),
    remedies=("bfloat16",),
    nonfinite=True,
    do_this="Keep the parameters that the optimizer steps in float32, or use bfloat16: `eps` and small second moments round to 0 in float16.",
    edits=("half-to-bfloat16", "half-to-float32"),
)


_BOUNDED = frozenset({"exp", "expm1", "exp2", "div", "reciprocal", "rsqrt", "log", "sqrt"})
"""Functions of which a bound of the argument, on the line itself, keeps the result finite."""


def _of_no_minimum(finding: Finding) -> str:
    """What to do about a loss that has no minimum; empty where it is the training that diverges."""
    unbounded = finding.cause.startswith(_WHY_UNBOUNDED)
    return "Look at the sign of the loss, and at what bounds each of its terms from below." if unbounded else ""


def _of_another_cause(finding: Finding) -> str:
    """What to do where the argument is not outside of a domain; empty where it is."""
    if finding.cause == BEYOND_FLOAT32 and overload_free(finding.op or "") not in _BOUNDED:
        return (
            f"The operands of `{finding.op}` are too large for its result to fit float32: scale or clip them before it, or look where they "
            "come from, the input (units, a corrupt row), the weights, or a learning rate that makes them grow."
        )
    return of_what_is_written(finding)


def _of_any_values(finding: Finding) -> str:
    """What to do where an operator gets too little; empty where that is not why."""
    if finding.cause != OF_ANY_VALUES:
        return ""
    return "Leave out what has nothing to compute, or divide by a count of at least 1: see how many elements, and which labels, `{op}` gets."


DOMAIN_ERROR = FindingSpec(
    id="domain-error",
    title="The operation has no finite result in float32 either",
    family=NON_FINITE,
    references=("https://github.com/pytorch/pytorch/issues/26098",),
    ablations=("autocast-off", *OF_ANY_FINDING),
    fits_wider_dtype=True,
    nonfinite=True,
    do_this="Keep what `{op}` gets inside of its domain{bound}.",
    instead=_of_another_cause,
    without_edit=_of_any_values,
    edits=("in-wider-dtype", "keep-in-domain"),
)

SPECS = (
    FindingSpec(
        id="float16-overflow",
        title="An operator's result left the range of float16",
        family=NON_FINITE,
        references=(
            "https://github.com/unslothai/unsloth-zoo/pull/600",
            "https://github.com/huggingface/transformers/issues/9295",
        ),
        remedies=("bfloat16",),
        ablations=("autocast-off", *OF_ANY_FINDING),
        fits_wider_dtype=True,
        nonfinite=True,
        do_this="Use bfloat16 in the place of float16: its max is 3.4e38.",
        edits=("half-to-bfloat16", "half-to-float32"),
    ),
    FindingSpec(
        id="attention-score-overflow",
        title="The attention scores overflow float16 before they are scaled",
        family=NON_FINITE,
        references=(
            "https://github.com/huggingface/transformers/pull/33317",
            "https://github.com/QwenLM/Qwen3/issues/761",
        ),
        remedies=("bfloat16",),
        ablations=("autocast-off", *OF_ANY_FINDING),
        fits_wider_dtype=True,
        nonfinite=True,
        do_this="Use bfloat16 in the place of float16{scores}.",
        edits=("half-to-bfloat16", "half-to-float32"),
    ),
    FindingSpec(
        id="norm-square-overflow",
        title="Squaring inside a norm overflowed and the norm returned zeros",
        family=NON_FINITE,
        references=(
            "https://github.com/sgl-project/sglang/pull/27540",
            "https://github.com/openvinotoolkit/openvino/issues/37041",
        ),
        remedies=("bfloat16",),
        ablations=("autocast-off", *OF_ANY_FINDING),
        fits_wider_dtype=True,
        nonfinite=True,
        do_this="Compute the norm in float32, or use bfloat16 in the place of float16.",
        edits=("half-to-bfloat16", "half-to-float32"),
    ),
    FindingSpec(
        id="fully-masked-row",
        title="Softmax over a row in which every position is masked",
        family=NON_FINITE,
        references=(
            "https://github.com/huggingface/transformers/pull/17306",
            "https://github.com/pytorch/pytorch/issues/26098",
        ),
        nonfinite=True,
        do_this=(
            "Mask with the smallest finite number of the dtype that the scores have, so that a row without any key stays finite: with -inf it is NaN, also where a "
            "cast to half precision has made -inf of float32's smallest number."
        ),
        edits=("finite-mask",),
    ),
    FindingSpec(
        id="backward-overflow",
        title="The forward is finite and the gradients overflow",
        family=NON_FINITE,
        references=(
            "https://github.com/unslothai/unsloth-zoo/pull/866",
            "https://github.com/unslothai/unsloth-zoo/pull/785",
        ),
        remedies=("bfloat16",),
        ablations=("autocast-off", *OF_ANY_FINDING, "loss-scale-one"),
        fits_wider_dtype=True,
        nonfinite=True,
        do_this="Use bfloat16 in the place of float16, without a gradient scaler.",
        edits=("half-to-bfloat16", "half-to-float32"),
    ),
    FindingSpec(
        id="nonfinite-parameters",
        title="A parameter was NaN or inf before the run used it",
        family=NON_FINITE,
        references=(
            "https://github.com/huggingface/transformers/issues/38665",
            "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1971",
        ),
        nonfinite=True,
    ),
    FindingSpec(
        id="nonfinite-input",
        title="The batch already contains NaN or inf",
        family=NON_FINITE,
        references=("https://github.com/huggingface/diffusers/issues/7563",),
        nonfinite=True,
        do_this="Find where the data gets its NaN or inf, and mend or leave out such a batch: no dtype of the model can help.",
        instead=of_what_is_written,
        edits=("skip-batch",),
    ),
    OPTIMIZER_EPSILON_UNDERFLOW,
    FindingSpec(
        id="rounds-out-of-domain",
        title="An epsilon, constant or result rounds to 0, and the next operator is not defined there",
        family=NON_FINITE,
        references=(
            "https://github.com/pytorch/pytorch/issues/32137",
            "https://github.com/kornia/kornia/issues/3966",
            "https://github.com/lightonai/pylate/issues/239",
        ),
        nonfinite=True,
        do_this=(
            "Compute this line and what leads to it in {wider}, or in a form that does not round there: `x.var()` for a difference of means, `log1p(-p)` "
            "for `log(1 - p)`, an epsilon that {dtype} can hold."
        ),
        edits=("in-wider-dtype", "keep-in-domain", "half-to-float32", "bfloat16-to-float32"),
    ),
    FindingSpec(
        id="divergence",
        title="The training diverges, in any dtype",
        family=NON_FINITE,
        references=(
            "https://github.com/OpenNMT/OpenNMT-tf/issues/744",
            "https://github.com/facebookresearch/detr/issues/285",
        ),
        ablations=("autocast-off", *OF_ANY_FINDING),
        in_float32_too=True,
        nonfinite=True,
        do_this="Lower the learning rate, or warm it up.",
        instead=_of_no_minimum,
        edits=("half-to-float32", "bfloat16-to-float32", "lower-learning-rate"),
    ),
    DOMAIN_ERROR,
    FindingSpec(
        id="compile-only-nonfinite",
        title="NaN or inf appears only when the model is compiled",
        family=COMPILE_AND_LOAD,
        references=(
            "https://github.com/pytorch/pytorch/issues/168126",
            "https://github.com/unslothai/unsloth/issues/3385",
        ),
        needs="compile-off",
        needs_only=True,
        nonfinite=True,
        do_this="Leave this module out of `torch.compile` until the compiled kernel is fixed.",
        edits=("without-compiler",),
    ),
    FLOAT8_RANGE,
)


JUDGES: tuple[Callable[[Origin], Finding | None], ...] = (
    judge_unseen,
    judge_written,
    judge_given,
    judge_masked_row,
    judge_optimizer_step,
    judge_norm_square,
    judge_attention_scores,
    judge_float8,
    judge_backward,
    judge_overflow,
    judge_unexamined,
    judge_rounded,
    judge_domain,
)
"""What an origin may be, the most specific first; the last one always has an answer."""


def detect_nonfinite(trace: Trace) -> Iterator[Finding]:
    """The origin of the first inf or NaN that gets anywhere, overflows that were swallowed on the way, and one that was refused."""
    refused = judge_constant(trace)
    found = tuple(_first_that_matters(trace)) if refused is None else (refused,)
    diverged = next((cause for finding in found if (cause := judge_divergence(trace, finding)) is not None), None)
    if diverged is not None:
        yield diverged
        found = tuple(replace(finding, remedies=(), consequence_of=diverged.id) for finding in found)
    yield from found
    places = {(finding.op, finding.source) for finding in found}
    yield from (f for f in swallowed_overflows(trace) if (f.op, f.source) not in places)


def _first_that_matters(trace: Trace) -> Iterator[Finding]:
    """The verdict on the first incident that matters; all later ones follow from it."""
    for incident, found in that_matter(graph_of(trace)):
        compiled = judge_compiled(trace, incident)
        if compiled is not None:
            yield compiled
        elif found.origin is None and looks_like_a_mask(trace, incident):
            continue  # without an op trace nothing tells log(0) from a mask; the report says that it is not known
        elif found.origin is None:
            yield judge_by_module(trace, incident)
        else:
            finding = next(finding for judge in JUDGES if (finding := judge(found.origin)) is not None)
            carried = through_unseen(found.origin) if finding.op is not None else ()
            yield replace(finding, evidence=(*finding.evidence, *carried))
        return


RULES = (Rule(name="non-finite", priority=50, specs=SPECS, detect=detect_nonfinite),)
