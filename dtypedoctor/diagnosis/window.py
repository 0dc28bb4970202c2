"""Where a second run should look closer."""

from dtypedoctor.diagnosis.modules import first_nonfinite
from dtypedoctor.scenario.request import Window
from dtypedoctor.trace.events import Raised
from dtypedoctor.trace.reader import Trace

DTYPE_WORDS = ("dtype", "scalar type", "same type", "bias type", "Half", "BFloat16")
"""Words by which torch's messages about mixed dtypes are recognised."""


def is_dtype_error(raised: Raised) -> bool:
    """Whether an exception complains about dtypes."""
    return any(word in raised.message for word in DTYPE_WORDS)


def suspicious_window(trace: Trace) -> Window | None:
    """The window in which the failure of ``trace`` happens: of a refused op, else of the first non-finite value.

    None where the trace shows neither.
    """
    raised = trace.last(Raised)
    if raised is not None and is_dtype_error(raised):
        return _window(raised.phase, raised.call, raised.step)
    first = first_nonfinite(trace)
    if first is None:
        return None
    sample, site = first
    return _window("optimizer" if site.kind == "param" else site.phase, sample.call, sample.step)


def _window(phase: str, call: int, step: int) -> Window:
    if phase == "optimizer":
        return Window(step=step, until="optimizer")
    return Window(call=call, until="backward" if phase in ("backward", "recompute") else "next-call")
