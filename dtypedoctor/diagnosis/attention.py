"""``attention-score-overflow`` and ``fully-masked-row``: what goes wrong between queries, keys, mask and softmax."""

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.nonfinite_origin import PRODUCTS, SOFTMAX, Origin, attention_experiment, found_at
from dtypedoctor.diagnosis.ops import ancestry, has_inf, overload_free
from dtypedoctor.diagnosis.overflow import needs, overflow_evidence, proof
from dtypedoctor.diagnosis.statement import Statement
from dtypedoctor.diagnosis.wording import bad_elements, how_the_run_ended, limit_of, magnitudes, place, short
from dtypedoctor.trace.events import Op

TO_SOFTMAX = 12
"""Scaling, soft capping, masks, casts and reshapes lie between the scores and their softmax, each an op."""


_FUSED = "the same attention with its scores in float32 is finite"
_UNMASKED = "the same softmax on the same scores without the mask is finite"

_CURES = {
    False: "A query that may look at nothing needs a rule of its own, or a mask that leaves it one position.",
    True: (
        "Not every entry was -inf at first: the mask holds finite numbers, and what was added to them left the range. One mask made by "
        "torch.where, or scores and mask added in float32, leave such a row finite."
    ),
}
"""What to do, by whether the mask was finite."""


def judge_attention_scores(origin: Origin) -> Finding | None:
    """A product of two activations whose overflow goes into a softmax."""
    if not origin.leaves_a_narrow_range or not _is_score(origin):
        return None
    op, dtype = origin.op, origin.result.dtype
    tried = attention_experiment(origin.trace, op)
    said = Statement(
        id="attention-score-overflow",
        proven_by=proof(origin) or (_FUSED if tried is not None and tried.is_of_the_scores else None),
        summary=f"The attention scores of {short(place(op))} overflow {dtype} in step {op.step}: {needs(origin)}.",
        cause=(
            f"Queries and keys are multiplied in {dtype} and scaled afterwards, so the product has to fit below "
            f"{limit_of(dtype):.6g} unscaled. Softmax makes NaN of the inf. Fused attention keeps the scores in float32."
        ),
        evidence=(*overflow_evidence(origin), *(tried.evidence if tried is not None else ())),
    )
    return found_at(origin, said)


def _is_score(origin: Origin) -> bool:
    op = origin.op
    if overload_free(op.op) not in PRODUCTS or any(t.origin == "parameter" for t in op.inputs):
        return False
    after = origin.graph.downstream(op, TO_SOFTMAX, ends=PRODUCTS | SOFTMAX)
    return any(overload_free(user.op) in SOFTMAX for user in after)


def judge_masked_row(origin: Origin) -> Finding | None:
    """A softmax over rows in which every entry is ``-inf``."""
    if not origin.masked:
        return None
    op = origin.op
    scores = next(t for t in op.inputs if has_inf(t))
    tried = attention_experiment(origin.trace, op)
    left = next(iter(ancestry(origin.graph, op).computed), None)
    said = Statement(
        id="fully-masked-row",
        proven_by=_UNMASKED if tried is not None and tried.is_of_the_mask else _in_a_wider_dtype(origin),
        summary=f"{short(place(op))} takes a softmax over rows in which every position is masked, in step {op.step}.",
        cause=(
            "Softmax subtracts the largest entry of a row. Where every entry is -inf that is -inf - (-inf), which is NaN "
            f"in every dtype. {_CURES[left is not None]}"
        ),
        evidence=(
            *((_how_it_left(left),) if left is not None else ()),
            f"The scores that {op.op} got hold {scores.num_neginf} times -inf, no +inf and no NaN.",
            f"{bad_elements(origin.result)} of its result are NaN.",
            *(tried.evidence if tried is not None else ()),
            *how_the_run_ended(origin.trace),
        ),
    )
    return found_at(origin, said)


def _in_a_wider_dtype(origin: Origin) -> str | None:
    """What the softmax makes of the same rows in a wider dtype; None where it was not run again."""
    replay = origin.replay
    if replay is None or replay.note or replay.finite:
        return None
    return f"the same softmax on the same rows in {replay.how} is NaN too, and every entry of these rows is -inf"


def _how_it_left(op: Op) -> str:
    made = next(t for t in op.outputs if not t.finite)
    return f"{op.op} at {op.source} made -inf of finite {made.dtype} numbers, absmax {magnitudes(op)}."
