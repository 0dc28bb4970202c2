"""What is said of an op that made inf or NaN and could not be run again: where it is, and that it was not examined."""

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.nonfinite_origin import NARROW, Origin, found_at
from dtypedoctor.diagnosis.statement import Statement
from dtypedoctor.diagnosis.wording import bad_elements, how_the_run_ended, limit_of, magnitudes, place, short

COLLECTIVE = "_c10d_functional."


def judge_unexamined(origin: Origin) -> Finding | None:
    """An op on finite operands of which no replay says whether a wider dtype helps; never more than possible."""
    op, replay, dtype = origin.op, origin.replay, origin.result.dtype
    if (replay is not None and not replay.note) or not all(t.finite for t in op.inputs):
        return None
    why = _why(origin)
    said = Statement(
        id="float16-overflow" if dtype in NARROW else "domain-error",
        confidence=Confidence.POSSIBLE,
        summary=f"{op.op} in {short(place(op))} is where {dtype} first stops being finite, in step {op.step}; it was not examined.",
        cause=(
            f"{op.op} at {op.source} has finite operands and a result that is not. {why}, so whether float32 holds the result is "
            "not known: run the program with this part in float32 to tell an overflow from an undefined operation."
        ),
        evidence=(
            f"The operands of {op.op} are finite: absmax {magnitudes(op)} ({dtype} max: {limit_of(dtype):,.6g}).",
            f"{bad_elements(origin.result)} of its {dtype} result are inf or NaN.",
            *how_the_run_ended(origin.trace),
        ),
    )
    return found_at(origin, said)


def _why(origin: Origin) -> str:
    if origin.op.op.startswith(COLLECTIVE):
        return "It is computed by several ranks, and one of them cannot repeat it alone"
    note = origin.replay.note if origin.replay is not None else ""
    return f"It could not be run again in a wider dtype{f' ({note})' if note else ''}"
