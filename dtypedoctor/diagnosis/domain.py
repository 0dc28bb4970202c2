"""``domain-error``: an operation that has no finite result in float32 either."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.nonfinite_origin import FLOAT32_MAX, Origin, found_at
from dtypedoctor.diagnosis.statement import Statement
from dtypedoctor.diagnosis.wording import bad_elements, differentiated, how_the_run_ended, magnitudes, place, short
from dtypedoctor.dtypes import HALF


def judge_domain(origin: Origin) -> Finding | None:
    """What no wider dtype would have helped; the last of the judges, on whatever none of the others explains."""
    op = origin.op
    proof = _proof(origin)
    said = Statement(
        id="domain-error",
        proven_by=proof,
        summary=f"{_what(origin)} has no finite float32 result for its operands, in step {op.step} ({op.phase}).",
        cause=_cause(origin, proven=proof is not None),
        evidence=tuple(_evidence(origin)),
    )
    return found_at(origin, said)


def _what(origin: Origin) -> str:
    op, forward = origin.op, differentiated(origin.op)
    if forward is not None:
        return f"{op.op} in the backward of `{forward}` at {op.source}"
    return f"{op.op} in {short(place(op))}"


def _proof(origin: Origin) -> str | None:
    """What shows that float32 has it too: the op on its own operands and on those of the float32 program.

    In a program without half precision these are the same.
    """
    op, replay, program = origin.op, origin.replay, origin.program
    if replay is None or replay.note:
        return None
    if program is not None and not program.note:
        return (
            None if program.finite else f"{op.op} on the operands of the same program in float32 is not finite either"
        )
    before = (t.dtype for one in origin.graph.ops if one.n <= op.n for t in (*one.inputs, *one.outputs))
    if any(dtype in HALF for dtype in before):
        return None
    return f"{op.op} run again on the same operands in {replay.how} has no finite float32 result either"


def _cause(origin: Origin, *, proven: bool) -> str:
    replay = origin.replay
    if replay is not None and replay.finite and replay.absmax is not None and replay.absmax > FLOAT32_MAX:
        return (
            "The operands have grown so far that the result is beyond float32's range too: the run diverges (learning rate, "
            "initialisation, gradients that are not clipped). This is not a mixed-precision problem."
        )
    undefined = (
        "The operation is not defined for these operands (a division by zero, the logarithm of a negative number …)"
    )
    narrow = next((t.dtype for t in origin.op.inputs if t.dtype in HALF), "half-precision")
    if proven:
        return f"{undefined} or its result is larger than float32 can hold. This is not a mixed-precision problem."
    return (
        f"{undefined}, and no wider dtype helps it. Some of what it computes with is {narrow}, though, and was not computed again "
        "in float32: a number that was rounded to 0 (or to 1) before would be another one."
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
        if origin.program is not None and not origin.program.finite:
            yield "Nor is it on the operands that the program has when all of it is computed in float32 since the op trace began."
    elif replay.absmax is not None and replay.absmax > FLOAT32_MAX:
        yield f"The same op in {replay.how} gives {replay.absmax:.6g}, beyond float32's largest, {FLOAT32_MAX:.6g}."
    else:
        yield f"The same op in {replay.how} is finite."
    yield from how_the_run_ended(origin.trace)
