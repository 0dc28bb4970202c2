"""``domain-error``: an operation that has no finite result in float32 either."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.origin import FLOAT32_MAX, Origin
from dtypedoctor.diagnosis.statement import Statement, found_at
from dtypedoctor.diagnosis.wording import bad_elements, how_the_run_ended, magnitudes, place, short

HALF = frozenset({"float16", "bfloat16"})
"""Dtypes in which a difference of two close numbers, or a small one, is easily rounded to 0."""


def judge_domain(origin: Origin) -> Finding | None:
    """What no wider dtype would have helped; also the verdict of last resort on an op that could not be replayed."""
    op, replay = origin.op, origin.replay
    settled = replay is not None and not replay.note
    said = Statement(
        id="domain-error",
        confidence=Confidence.PROVEN if settled else Confidence.LIKELY,
        summary=f"{op.op} in {short(place(op))} has no finite float32 result for its operands, in step {op.step} ({op.phase}).",
        cause=_cause(origin),
        evidence=tuple(_evidence(origin)),
    )
    return found_at(origin, said)


def _cause(origin: Origin) -> str:
    replay = origin.replay
    if replay is not None and replay.finite and replay.absmax is not None and replay.absmax > FLOAT32_MAX:
        return (
            "The operands have grown so far that the result is beyond float32's range too: the run diverges (learning rate, "
            "initialisation, gradients that are not clipped). This is not a mixed-precision problem."
        )
    undefined = (
        "The operation is not defined for these operands (a division by zero, the logarithm of a negative number …)"
    )
    narrow = next((t.dtype for t in origin.op.inputs if t.dtype in HALF), None)
    if narrow is None:
        return f"{undefined} or its result is larger than float32 can hold. This is not a mixed-precision problem."
    return (
        f"{undefined}, and no wider dtype helps it. Its operands are {narrow}, though: one that was rounded to 0 (or to 1) "
        "just before would be another number in float32."
    )


def _evidence(origin: Origin) -> Iterator[str]:
    op, replay = origin.op, origin.replay
    if all(t.finite for t in op.inputs):
        yield f"The operands of {op.op} are finite: absmax {magnitudes(op)}."
    else:
        yield f"{op.op} was given infinities that the program asked for, and made NaN of them."
    yield f"{bad_elements(origin.result)} of its {origin.result.dtype} result are inf or NaN."
    if replay is None or replay.note:
        why = f": {replay.note}" if replay is not None else ""
        yield f"It could not be run again in a wider dtype{why}."
    elif not replay.finite:
        yield f"The same op on the same operands in {replay.how} is not finite either."
    elif replay.absmax is not None and replay.absmax > FLOAT32_MAX:
        yield f"The same op in {replay.how} gives {replay.absmax:.6g}, beyond float32's largest, {FLOAT32_MAX:.6g}."
    else:
        yield f"The same op in {replay.how} is finite."
    yield from how_the_run_ended(origin.trace)
