"""``float16-overflow``: a result that float32 holds and its own dtype does not."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.nonfinite_origin import Origin, found_at
from dtypedoctor.diagnosis.statement import Statement
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
        proven_by=proof(origin),
        summary=f"{short(place(op))} overflows {dtype} in step {op.step} ({op.phase}): {needs(origin)}.",
        cause=(
            f"{op.op} at {op.source} has finite operands, and a sum inside of it grows beyond the largest finite {dtype} value, "
            f"{limit:.6g}, although the result would not. Modules after it only propagate the inf."
            if fits(origin)
            else f"{op.op} at {op.source} has finite operands and a result larger than the largest finite {dtype} value, "
            f"{limit:.6g}, which becomes inf. Modules after it only pass the inf on."
        ),
        evidence=tuple(overflow_evidence(origin)),
    )
    return found_at(origin, said)


def proof(origin: Origin) -> str | None:
    """The replay that proves an overflow; None where it shows nothing that the op's own dtype could not hold."""
    op, replay = origin.op, origin.replay
    if not origin.is_proven or replay is None or replay.absmax is None:
        return None
    dtype = origin.result.dtype
    if fits(origin):
        return (
            f"{op.op} run again on the same operands in {replay.how} is finite, and its result would fit into {dtype}"
        )
    return (
        f"{op.op} run again on the same operands in {replay.how} gives finite values up to {replay.absmax:,.6g}, "
        f"beyond {dtype} max ({limit_of(dtype):,.6g})"
    )


def fits(origin: Origin) -> bool:
    """Whether the result, computed in a wider dtype, is one that the op's own dtype can hold: a sum on the way to it is not."""
    replay = origin.replay
    if replay is None or not replay.finite or replay.absmax is None:
        return False
    return replay.absmax <= limit_of(origin.result.dtype)


def needs(origin: Origin) -> str:
    """The range that the result needs against the range that there is."""
    replay, dtype = origin.replay, origin.result.dtype
    if replay is not None and fits(origin):
        return (
            f"a sum inside of {origin.op.op} exceeds {dtype} max ({limit_of(dtype):,.6g}), "
            f"although its result would be {replay.absmax:,.6g}"
        )
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
