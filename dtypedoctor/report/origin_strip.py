"""The modules around the origin of a failure, with dtype and magnitude, in execution order."""

from dtypedoctor.analysis import analysis_of
from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.modules import class_of, same_call
from dtypedoctor.diagnosis.registry import spec_of
from dtypedoctor.dtypes import headroom
from dtypedoctor.report.model import StripRow
from dtypedoctor.trace.events import Op, Sample, Site
from dtypedoctor.trace.reader import Trace

BEFORE, AFTER = 6, 4
"""How many modules are shown before and after the first one that is not finite."""


def origin_strip(trace: Trace, finding: Finding | None) -> tuple[StripRow, ...]:
    """The modules that returned just before and after the failure; empty where all is finite.

    The failure is the first non-finite value: where dtypes disagree, magnitudes mean nothing, and there is no strip. An
    origin that is not itself among the modules shown (the op lies between two children of it) has a row of its own before
    the first bad one.
    """
    first = analysis_of(trace).first_nonfinite
    if first is None:
        return ()
    if finding is not None and not _knows_origin(finding):
        finding = None
    anchor = first[0]
    around = _distinct(same_call(trace, anchor), anchor)
    place = next(i for i, (s, _) in enumerate(around) if s is anchor)
    shown = around[max(0, place - BEFORE) : place + AFTER + 1]
    rows = [_row(s, site, finding) for s, site in shown]
    if finding is not None and finding.fqn and not any(row.is_origin for row in rows):
        at = next(i for i, (s, _) in enumerate(shown) if s is anchor)
        rows.insert(at, _origin_row(trace, finding))
    return tuple(rows)


def _knows_origin(finding: Finding) -> bool:
    """Whether the finding says where the value comes from; not one about something else, nor where it was only seen first."""
    return spec_of(finding.id).nonfinite and not (finding.op is None and finding.confidence is Confidence.POSSIBLE)


def _distinct(found: list[tuple[Sample, Site]], keep: Sample) -> list[tuple[Sample, Site]]:
    """Leaves out containers that return what their last child has returned, unless it is the one to keep."""
    kept: list[tuple[Sample, Site]] = []
    for s, site in found:
        last = kept[-1] if kept else None
        if last and s is not keep and last[1].fqn.startswith(site.fqn) and _same(last, (s, site)):
            continue
        kept.append((s, site))
    return kept


def _same(one: tuple[Sample, Site], other: tuple[Sample, Site]) -> bool:
    return (one[0].absmax, one[0].num_nan, one[0].num_inf, one[1].dtype, one[1].shape) == (
        other[0].absmax, other[0].num_nan, other[0].num_inf, other[1].dtype, other[1].shape)  # fmt: skip


def _row(sample: Sample, site: Site, finding: Finding | None) -> StripRow:
    return StripRow(
        fqn=site.fqn,
        cls=site.cls,
        dtype=site.dtype,
        absmax=sample.absmax,
        num_nan=sample.num_nan,
        num_inf=sample.num_inf,
        headroom=headroom(sample.absmax, site.dtype),
        is_origin=finding is not None and site.fqn == finding.fqn,
    )


def _origin_row(trace: Trace, finding: Finding) -> StripRow:
    """The origin as its op left it, where the op was traced."""
    fqn = finding.fqn or ""
    made = [
        t
        for op in trace.all(Op)
        if op.fqn == fqn and op.op == finding.op and op.step == finding.step
        for t in op.outputs
    ]
    result = next((tensor for tensor in made if not tensor.finite), made[-1] if made else None)
    absmax = result.absmax if result else None
    dtype = (result.dtype if result else None) or finding.dtype or ""
    return StripRow(
        fqn=fqn,
        cls=class_of(trace, fqn),
        dtype=dtype,
        absmax=absmax,
        num_nan=result.num_nan if result else 0,
        num_inf=result.num_posinf + result.num_neginf if result else 0,
        headroom=headroom(absmax, dtype) if absmax is not None else None,
        is_origin=True,
    )
