"""``optimizer-epsilon-underflow``: an optimizer step that divides by a number which float16 has rounded to zero."""

from collections.abc import Iterator
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.nonfinite_origin import NARROW, Origin, found_at, is_zero_in
from dtypedoctor.diagnosis.ops import overload_free
from dtypedoctor.diagnosis.statement import Statement
from dtypedoctor.diagnosis.wording import bad_elements, module_of, place, short
from dtypedoctor.dtypes import DTYPES

DIVISIONS = frozenset(
    {"div", "addcdiv", "reciprocal", "rsqrt", "_foreach_div", "_foreach_addcdiv", "_foreach_reciprocal", "_fused_adam",
     "_fused_adamw"}
)  # fmt: skip


def judge_optimizer_step(origin: Origin) -> Finding | None:
    """A division in the optimizer step whose finite float16 operands give NaN or inf."""
    op, dtype = origin.op, origin.result.dtype
    if op.phase != "optimizer" or dtype not in NARROW or overload_free(op.op) not in DIVISIONS:
        return None
    seen = origin.incident.site
    fqn = module_of(seen.fqn) if seen is not None else place(op)
    vanished = _vanished_epsilon(origin)
    said = Statement(
        id="optimizer-epsilon-underflow",
        proven_by=(
            f"the epsilon {vanished} that guards the division rounds to 0 in {dtype}, and does not in float32"
            if vanished is not None
            else None
        ),
        summary=f"The optimizer divides by zero in {dtype} in step {op.step} and writes NaN or inf into {short(fqn)}.",
        cause=(
            f"The optimizer keeps its state in the parameters' dtype. The smallest positive {dtype} is "
            f"{DTYPES[dtype].smallest:.3g}: the epsilon that guards the division and small second moments are zero in it."
        ),
        evidence=tuple(_evidence(origin, vanished)),
    )
    return replace(found_at(origin, said), fqn=fqn)


def _vanished_epsilon(origin: Origin) -> str | None:
    """The number that was added to a denominator and is zero in its dtype, as it stands in the code."""
    makers = (origin.graph.producer(t) for t in origin.op.inputs)
    for maker in [op for op in makers if op is not None and overload_free(op.op) in ("add", "_foreach_add")]:
        for text in maker.scalars:
            if is_zero_in(text, maker):
                return text
    return None


def _evidence(origin: Origin, vanished: str | None) -> Iterator[str]:
    op = origin.op
    yield f"The operands of {op.op} are finite, its result is not: {bad_elements(origin.result)}."
    if vanished is not None:
        yield f"The epsilon {vanished} that was added to the denominator is zero in {origin.result.dtype}."
    yield "The gradients of this step are finite."
