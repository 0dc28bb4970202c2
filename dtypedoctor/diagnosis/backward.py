"""``backward-overflow``: the forward is finite and a gradient leaves the range."""

from collections.abc import Iterator
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.nonfinite_origin import Origin, found_at, skipped_scale
from dtypedoctor.diagnosis.overflow import needs, overflow_evidence, proof
from dtypedoctor.diagnosis.statement import Statement
from dtypedoctor.diagnosis.wording import limit_of, module_of, place, short


def judge_backward(origin: Origin) -> Finding | None:
    """An overflow of a backward op."""
    op, dtype = origin.op, origin.result.dtype
    if op.phase != "backward" or not origin.leaves_a_narrow_range:
        return None
    parameter = _added_up(origin)
    if parameter is not None:
        return replace(found_at(origin, _of_a_sum(origin, parameter)), fqn=module_of(parameter))
    said = Statement(
        id="backward-overflow",
        proven_by=proof(origin),
        summary=f"The gradients overflow {dtype} in the backward of {short(place(op))}, in step {op.step}: {needs(origin)}.",
        cause=(
            "Gradients have their own magnitudes: the product of all slopes between the loss and a tensor. The values of the "
            f"forward pass are finite, this gradient is not: {dtype} ends at {limit_of(dtype):.6g} here too."
        ),
        evidence=(*overflow_evidence(origin), *_about_the_scale(origin)),
    )
    return found_at(origin, said)


def _added_up(origin: Origin) -> str | None:
    """The parameter to whose gradient the op adds that of one more backward pass; None for every other op."""
    op, seen = origin.op, origin.incident
    if not op.inplace or place(op) is not None or seen.kind != "grad":
        return None
    sites = [origin.trace.sites[sample.site] for sample in seen.samples]
    return next((s.fqn for s in sites if s.kind == "grad" and s.shape == origin.result.shape), None)


def _of_a_sum(origin: Origin, parameter: str) -> Statement:
    op, dtype = origin.op, origin.result.dtype
    return Statement(
        id="backward-overflow",
        proven_by=proof(origin),
        summary=f"The gradient of {short(parameter)} overflows {dtype} where backward passes are added up, in step {op.step}: "
        f"{needs(origin)}.",
        cause=(
            f"Each backward pass adds to the gradient that the ones before it have left, in the parameter's own {dtype}. Every part "
            f"is finite, their sum is not. Divide the loss by the number of passes, or keep the parameters in float32."
        ),
        evidence=(*overflow_evidence(origin), *_about_the_scale(origin)),
    )


def _about_the_scale(origin: Origin) -> Iterator[str]:
    scale, replay = skipped_scale(origin.trace, origin.op.step), origin.replay
    if scale is not None and replay is not None and replay.absmax is not None:
        yield f"The loss scale was {scale:g}; at scale 1 the result would be {replay.absmax / scale:.6g}, still too large."
