"""The non-finite family: looks for the origin of the first inf or NaN that matters, and asks one judge after another what it is."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.nonfinite_origin import Origin, that_matter
from dtypedoctor.diagnosis.ops import graph_of
from dtypedoctor.diagnosis.rule import COMPILE_AND_LOAD, NON_FINITE, OF_ANY_FINDING, FindingSpec, Rule
from dtypedoctor.rules.nonfinite.divergence import judge_divergence
from dtypedoctor.rules.nonfinite.overflow import (
    judge_attention_scores,
    judge_backward,
    judge_masked_row,
    judge_norm_square,
    judge_overflow,
    swallowed_overflows,
)
from dtypedoctor.rules.nonfinite.undefined import judge_domain, judge_optimizer_step, judge_rounded, judge_unexamined
from dtypedoctor.rules.nonfinite.unrecorded import judge_by_module, judge_compiled, judge_constant, judge_given
from dtypedoctor.trace.model import Trace

FLOAT16_OVERFLOW = FindingSpec(
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
)
ATTENTION_SCORE_OVERFLOW = FindingSpec(
    id="attention-score-overflow",
    title="The attention scores overflow float16 before they are scaled",
    family=NON_FINITE,
    references=("https://github.com/huggingface/transformers/pull/33317", "https://github.com/QwenLM/Qwen3/issues/761"),
    remedies=("bfloat16",),
    ablations=("autocast-off", *OF_ANY_FINDING),
    fits_wider_dtype=True,
    nonfinite=True,
)
NORM_SQUARE_OVERFLOW = FindingSpec(
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
)
FULLY_MASKED_ROW = FindingSpec(
    id="fully-masked-row",
    title="Softmax over a row in which every position is masked",
    family=NON_FINITE,
    references=(
        "https://github.com/huggingface/transformers/pull/17306",
        "https://github.com/pytorch/pytorch/issues/26098",
    ),
    nonfinite=True,
)
BACKWARD_OVERFLOW = FindingSpec(
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
)
NONFINITE_PARAMETERS = FindingSpec(
    id="nonfinite-parameters",
    title="A parameter was NaN or inf before the run used it",
    family=NON_FINITE,
    references=(
        "https://github.com/huggingface/transformers/issues/38665",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1971",
    ),
    nonfinite=True,
)
NONFINITE_INPUT = FindingSpec(
    id="nonfinite-input",
    title="The batch already contains NaN or inf",
    family=NON_FINITE,
    references=("https://github.com/huggingface/diffusers/issues/7563",),
    nonfinite=True,
)
OPTIMIZER_EPSILON_UNDERFLOW = FindingSpec(
    id="optimizer-epsilon-underflow",
    title="The optimizer's epsilon or second moment vanishes in float16",
    family=NON_FINITE,
    references=("https://github.com/NVIDIA/apex/issues/240", "https://github.com/google-deepmind/optax/issues/1754"),
    remedies=("bfloat16",),
    nonfinite=True,
)
ROUNDS_OUT_OF_DOMAIN = FindingSpec(
    id="rounds-out-of-domain",
    title="An epsilon, constant or result rounds to 0, and the next operator is not defined there",
    family=NON_FINITE,
    references=(
        "https://github.com/pytorch/pytorch/issues/32137",
        "https://github.com/kornia/kornia/issues/3966",
        "https://github.com/lightonai/pylate/issues/239",
    ),
    nonfinite=True,
)
DIVERGENCE = FindingSpec(
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
)
DOMAIN_ERROR = FindingSpec(
    id="domain-error",
    title="The operation has no finite result in float32 either",
    family=NON_FINITE,
    references=("https://github.com/pytorch/pytorch/issues/26098",),
    ablations=("autocast-off", *OF_ANY_FINDING),
    fits_wider_dtype=True,
    nonfinite=True,
)
COMPILE_ONLY_NONFINITE = FindingSpec(
    id="compile-only-nonfinite",
    title="NaN or inf appears only when the model is compiled",
    family=COMPILE_AND_LOAD,
    references=("https://github.com/pytorch/pytorch/issues/168126", "https://github.com/unslothai/unsloth/issues/3385"),
    needs="compile-off",
    needs_only=True,
    nonfinite=True,
)

SPECS = (
    FLOAT16_OVERFLOW,
    ATTENTION_SCORE_OVERFLOW,
    NORM_SQUARE_OVERFLOW,
    FULLY_MASKED_ROW,
    BACKWARD_OVERFLOW,
    NONFINITE_PARAMETERS,
    NONFINITE_INPUT,
    OPTIMIZER_EPSILON_UNDERFLOW,
    ROUNDS_OUT_OF_DOMAIN,
    DIVERGENCE,
    DOMAIN_ERROR,
    COMPILE_ONLY_NONFINITE,
)


JUDGES: tuple[Callable[[Origin], Finding | None], ...] = (
    judge_given,
    judge_masked_row,
    judge_optimizer_step,
    judge_norm_square,
    judge_attention_scores,
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
        elif found.origin is None:
            yield judge_by_module(trace, incident)
        else:
            yield next(finding for judge in JUDGES if (finding := judge(found.origin)) is not None)
        return


RULES = (Rule(name="non-finite", specs=SPECS, detect=detect_nonfinite),)
