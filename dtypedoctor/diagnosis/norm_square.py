"""``norm-square-overflow``: a norm whose squares leave the range, so that it returns zeros or NaN."""

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.nonfinite_origin import Origin, found_at
from dtypedoctor.diagnosis.ops import OpGraph, overload_free
from dtypedoctor.diagnosis.overflow import needs, overflow_evidence, proof
from dtypedoctor.diagnosis.statement import Statement
from dtypedoctor.diagnosis.wording import place, short
from dtypedoctor.trace.events import Op

REDUCTIONS = frozenset({"sum", "mean"})
LENGTHS = frozenset({"linalg_vector_norm", "norm"})
ROOTS = frozenset({"sqrt", "rsqrt"})
DIVISIONS = frozenset({"div", "reciprocal"})
TO_ROOT = 8
"""The mean, an epsilon, casts and reshapes lie between the squares and the root."""

CAUSE = (
    "A norm computes the root of a mean of squares. The square of 256 is already beyond float16's 65504; it becomes inf, its "
    "reciprocal root 0, and the norm returns zeros that carry no information. Norms that compute in float32 inside and cast "
    "their result are not affected."
)


def judge_norm_square(origin: Origin) -> Finding | None:
    """An overflow in the squares, their sum or their root inside a norm."""
    op = origin.op
    if not origin.leaves_a_narrow_range or not is_in_norm(origin.graph, op):
        return None
    said = Statement(
        id="norm-square-overflow",
        proven_by=proof(origin),
        summary=f"The squares inside {short(place(op))} overflow in step {op.step}: {needs(origin)}.",
        cause=CAUSE,
        evidence=tuple(overflow_evidence(origin)),
    )
    return found_at(origin, said)


def is_in_norm(graph: OpGraph, op: Op) -> bool:
    """Whether ``op`` squares, sums squares or takes a length, and a root or division follows."""
    name = overload_free(op.op)
    after = {overload_free(user.op) for user in graph.downstream(op, TO_ROOT, ends=ROOTS | DIVISIONS)}
    if name in LENGTHS:
        return bool(after & DIVISIONS)
    squares = is_square(op) or (name in REDUCTIONS and _sums_squares(graph, op))
    return squares and bool(after & ROOTS)


def is_square(op: Op) -> bool:
    """Whether ``op`` multiplies a tensor with itself."""
    name = overload_free(op.op)
    if name == "pow":
        return any(text in ("2", "2.0") for text in op.scalars)
    return name == "square" or (name == "mul" and len(op.inputs) == 2 and op.inputs[0].id == op.inputs[1].id)


def _sums_squares(graph: OpGraph, op: Op) -> bool:
    makers = (graph.producer(t) for t in op.inputs)
    return any(maker is not None and is_square(maker) for maker in makers)
