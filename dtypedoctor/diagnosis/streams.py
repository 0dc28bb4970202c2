"""Kernels that were launched on another CUDA stream than the current one."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trace.records.execution import StreamLaunches

__all__ = ["detect_stale_streams"]


def detect_stale_streams(trace: Trace) -> Iterator[Finding]:
    """One finding for all launches whose stream was not the current one of the memory's device."""
    uses = trace.observed(StreamLaunches)
    stale = [seen for seen in uses if seen.what.stale]
    if not stale:
        return
    launched = sum(o.what.count for o in uses)
    wrong = sum(o.what.count for o in stale)
    first = stale[0]
    said = Statement(
        id="stale-cuda-stream",
        confidence=Confidence.LIKELY,
        summary=f"{wrong} of {launched} kernel launches went to another CUDA stream than the current one of {first.what.device}.",
        cause=(
            "The stream's handle was asked for once and kept. Work on another stream is not ordered with what the current "
            "stream does before and after it, so a weight may be used before it is dequantised, or read while it changes."
        ),
        evidence=tuple(
            f"{o.what.count} launches on {o.what.device}: stream {o.what.used:#x}, current {o.what.current:#x}."
            for o in stale
        ),
    )
    yield located(said, phase=first.phase, step=first.step)
