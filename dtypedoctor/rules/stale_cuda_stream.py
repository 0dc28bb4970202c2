"""``stale-cuda-stream``: kernels that are launched on another stream than the current one.

Seen only where a model names the functions that choose its streams (:class:`dtypedoctor.plugins.Model`).
"""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.rule import COMPILE_AND_LOAD, FindingSpec, Rule
from dtypedoctor.diagnosis.statement import Statement, make_finding
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import StreamLaunches

__all__ = ["detect_stale_streams"]

SPEC = FindingSpec(
    id="stale-cuda-stream",
    title="A kernel is launched on a CUDA stream that was remembered from an earlier call",
    family=COMPILE_AND_LOAD,
    references=("https://github.com/thad0ctor/axolotl/pull/25",),
    in_any_program=False,
)


def detect_stale_streams(trace: Trace) -> Iterator[Finding]:
    """One finding for all launches whose stream was not the current one of the memory's device."""
    uses = trace.observed(StreamLaunches)
    stale = [seen for seen in uses if seen.what.stale]
    if not stale:
        return
    launched = sum(o.what.count for o in uses)
    wrong = sum(o.what.count for o in stale)
    first = stale[0]
    statement = Statement(
        id="stale-cuda-stream",
        confidence=Confidence.LIKELY,
        summary=f"{wrong} of {launched} kernel launches went to another CUDA stream than the current one of {first.what.device}.",
        cause=(
            "The stream's handle was asked for once and kept. Work on another stream is not ordered with what the current "
            "stream does before and after it, so a weight may be used before it is dequantized, or read while it changes."
        ),
        evidence=tuple(
            f"{o.what.count} launches on {o.what.device}: stream {o.what.used:#x}, current {o.what.current:#x}."
            for o in stale
        ),
    )
    yield make_finding(statement, phase=first.phase, step=first.step)


RULES = (Rule(name="streams", specs=(SPEC,), detect=detect_stale_streams),)
