"""NaN outside of modules that infinities have spread to finite values, and that somebody then replaces: ``silent-rescue``.

A guard that puts a number in place of each NaN is no failure where the NaN was made of that element alone, as of 0/0 or of a masked
one. It is one where an infinity has gone into a sum over others: their values were fine, and are gone with it.
"""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding, Severity
from dtypedoctor.diagnosis.ops import OpGraph, ancestry, graph_of, has_nan
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.wording import listed
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.events import Op, TensorNote
from dtypedoctor.trace.reader import Trace

__all__ = ["detect_erased"]


def detect_erased(trace: Trace) -> Iterator[Finding]:
    """One finding for each line that replaces such NaN."""
    graph = graph_of(trace)
    told: set[str | None] = set()
    for op in graph.ops:
        if op.sentinel and op.source not in told and _replaces_nan(op) and (found := _spread(graph, op)) is not None:
            told.add(op.source)
            yield found


def _replaces_nan(op: Op) -> bool:
    floats = [t for t in op.outputs if t.dtype in DTYPES]
    return bool(floats) and all(t.finite for t in floats) and any(map(has_nan, op.inputs))


def _spread(graph: OpGraph, op: Op) -> Finding | None:
    found = ancestry(graph, op)
    if any(all(t.finite for t in maker.inputs) for maker in found.nan_makers):
        return None  # 0/0: no infinity is needed for that
    sources = [*found.asked, *found.computed]
    made = [t for source in sources for t in source.outputs] + [t for _, t in found.given]
    infinities = sum(map(_infinities, {t.id: t for t in made}.values()))
    replaced = max(t.num_nan for t in op.inputs)
    if not 0 < infinities < replaced:
        return None
    return _finding(op, replaced, infinities, [s.source for s in sources if s.source], found.nan_makers)


def _infinities(tensor: TensorNote) -> int:
    return tensor.num_posinf + tensor.num_neginf


def _finding(op: Op, replaced: int, infinities: int, sources: list[str], makers: tuple[Op, ...]) -> Finding:
    lost = replaced - infinities
    count = "1 infinity" if infinities == 1 else f"{infinities:,} infinities"
    begin = f" made at {listed(list(dict.fromkeys(sources)))}" if sources else " in the input"
    statement = Statement(
        id="silent-rescue",
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        summary=f"{op.op} replaces {replaced:,} NaN that {count} made of a whole group: {lost:,} finite values are lost with them.",
        cause=(
            f"{count}{begin} went into a mean, a sum or a norm over other values, and the results are NaN for all of them; {op.op} at "
            f"{op.source} puts numbers in their place. No error is raised, and nothing is learned from these values. Give such elements "
            "a finite value, or leave them out before the mean."
        ),
        evidence=tuple(f"{maker.op} at {maker.source} makes NaN of infinities." for maker in makers[:3]),
    )
    return located(statement, phase=op.phase, step=op.step, op=op.op, source=op.source, dtype=op.outputs[0].dtype)
