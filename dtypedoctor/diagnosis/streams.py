"""Kernels that were launched on another CUDA stream than the current one."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.trace.events import Observation
from dtypedoctor.trace.reader import Trace

__all__ = ["detect_stale_streams"]


def detect_stale_streams(trace: Trace) -> Iterator[Finding]:
    """One finding for all launches whose stream was not the current one of the memory's device."""
    uses = [o for o in trace.all(Observation) if o.kind == "cuda-stream"]
    stale = [o for o in uses if o.values["stale"]]
    if not stale:
        return
    launched = sum(int(o.values["count"]) for o in uses)
    wrong = sum(int(o.values["count"]) for o in stale)
    first = stale[0]
    said = Statement(
        id="stale-cuda-stream",
        confidence=Confidence.LIKELY,
        summary=f"{wrong} of {launched} kernel launches went to another CUDA stream than the current one of {first.values['device']}.",
        cause=(
            "The stream's handle was asked for once and kept. Work on another stream is not ordered with what the current "
            "stream does before and after it, so a weight may be used before it is dequantised, or read while it changes."
        ),
        evidence=tuple(
            f"{o.values['count']} launches on {o.values['device']}: stream {int(o.values['used']):#x}, current "
            f"{int(o.values['current']):#x}."
            for o in stale
        ),
    )
    yield located(said, phase=first.phase, step=first.step)
