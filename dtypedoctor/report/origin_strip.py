"""The modules around the origin of a failure, with dtype and magnitude, in execution order."""

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.modules import first_nonfinite, same_call
from dtypedoctor.dtypes import headroom
from dtypedoctor.report.model import StripRow
from dtypedoctor.trace.events import Sample, Site
from dtypedoctor.trace.reader import Trace

BEFORE, AFTER = 6, 4
"""How many modules are shown before and after the first one that is not finite."""


def origin_strip(trace: Trace, finding: Finding | None) -> tuple[StripRow, ...]:
    """The modules that returned just before and after the first non-finite value; empty for a finite trace."""
    first = first_nonfinite(trace)
    if first is None:
        return ()
    sample, _ = first
    around = _distinct(same_call(trace, sample), sample)
    place = next(i for i, (s, _) in enumerate(around) if s is sample)
    return tuple(_row(s, site, finding) for s, site in around[max(0, place - BEFORE) : place + AFTER + 1])


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
