"""``float16-overflow``: a result that float32 holds and its own dtype does not."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.origin import Origin
from dtypedoctor.diagnosis.statement import Statement, found_at
from dtypedoctor.diagnosis.wording import bad_elements, how_the_run_ended, limit_of, magnitudes, place, short
from dtypedoctor.dtypes import short_name


def judge_overflow(origin: Origin) -> Finding | None:
    """An overflow that none of the more specific findings explains."""
    if not origin.leaves_a_narrow_range:
        return None
    op, dtype = origin.op, origin.result.dtype
    limit = limit_of(dtype)
    said = Statement(
        id="float16-overflow",
        confidence=Confidence.PROVEN if origin.is_proven else Confidence.LIKELY,
        summary=f"{short(place(op))} overflows {dtype} in step {op.step} ({op.phase}): {needs(origin)}.",
        cause=(
            f"{op.op} at {op.source} has finite operands and a result larger than the largest finite {dtype} value, "
            f"{limit:.6g}, which becomes inf. Modules after it only pass the inf on."
        ),
        evidence=tuple(overflow_evidence(origin)),
    )
    return found_at(origin, said)


def needs(origin: Origin) -> str:
    """The range that the result needs against the range that there is."""
    replay, dtype = origin.replay, origin.result.dtype
    wanted = f"{replay.absmax:.6g}" if replay is not None and replay.absmax is not None else "more"
    return f"{origin.op.op} needs {wanted}, {dtype} ends at {limit_of(dtype):.6g}"


def overflow_evidence(origin: Origin) -> Iterator[str]:
    """What was measured about an op whose finite operands gave something that is not finite."""
    op, replay, result = origin.op, origin.replay, origin.result
    limit = f"largest {result.dtype}: {limit_of(result.dtype):.6g}"
    yield f"The operands of {op.op} are finite: absmax {magnitudes(op)} ({limit})."
    yield f"{bad_elements(result)} of its {short_name(result.dtype)} result are inf or NaN."
    if replay is not None and replay.finite and replay.absmax is not None:
        yield f"The same op on the same operands in {replay.how} is finite, absmax {replay.absmax:.6g}."
    seen = origin.incident.site
    if seen is not None and seen.kind == "output" and seen.fqn != place(op):
        yield f"{short(seen.fqn)} ({seen.cls}) is the first module that returns the bad value; it only passes it on."
    yield from how_the_run_ended(origin.trace)
