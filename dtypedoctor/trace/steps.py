"""What counts as a step in a process in which no optimizer has made one."""

from dataclasses import replace
from typing import Any

from dtypedoctor.trace.events import ScalerState
from dtypedoctor.trace.reader import Trace

__all__ = ["steps_by_call"]


def steps_by_call(trace: Trace) -> Trace:
    """The trace with the number of the outermost call as the step, if no optimizer step was done in it; else unchanged.

    A script that only evaluates or generates, or that fails before its first optimizer step, would otherwise be in step 1
    from beginning to end.
    """
    if _optimized(trace):
        return trace
    return replace(
        trace,
        records=tuple(_renumbered(record) for record in trace.records),
        samples=tuple(replace(sample, step=max(sample.call, 1)) for sample in trace.samples),
        by_call=True,
        cursor=replace(trace.cursor, step=max(trace.cursor.call, 1)) if trace.cursor is not None else None,
    )


def _optimized(trace: Trace) -> bool:
    return (
        (trace.end is not None and trace.end.steps_completed > 0)
        or any(site.kind == "param" for site in trace.sites.values())
        or bool(trace.all(ScalerState))
    )


def _renumbered(record: Any) -> Any:
    if hasattr(record, "step") and hasattr(record, "call"):
        return replace(record, step=max(record.call, 1))
    return record
