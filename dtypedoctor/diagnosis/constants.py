"""``float16-overflow`` of a number in the code: torch refuses to make a float16 tensor's element of it."""

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.wording import class_of, failing_line, how_the_run_ended, limit_of, short
from dtypedoctor.trace.events import Raised
from dtypedoctor.trace.reader import Trace

__all__ = ["judge_constant"]

REFUSED = (
    "cannot be converted to type at::Half without overflow",
    "cannot be converted to type c10::Half without overflow",
)


def judge_constant(trace: Trace) -> Finding | None:
    """The number that ended the run because float16 does not hold it, such as the ``-1e9`` of a mask."""
    raised = trace.last(Raised)
    if raised is None or not any(text in raised.message for text in REFUSED):
        return None
    fqn = raised.modules[-1] if raised.modules else None
    what = raised.op or "an operation"
    said = Statement(
        id="float16-overflow",
        confidence=Confidence.LIKELY,
        summary=f"{what} in {short(fqn)} is given a number that float16 cannot hold, in step {raised.step} ({raised.phase}).",
        cause=(
            f"The number is written in the code or computed outside of tensors, and the tensor that it is to go into is float16, "
            f"which ends at {limit_of('float16'):.6g}; torch refuses instead of writing inf. A mask's -1e9 is the usual case: "
            "torch.finfo(x.dtype).min fits every dtype."
        ),
        evidence=how_the_run_ended(trace),
    )
    return located(
        said,
        phase=raised.phase,
        step=raised.step,
        fqn=fqn,
        op=raised.op,
        dtype="float16",
        source=failing_line(raised),
        cls=class_of(trace, fqn or ""),
    )
