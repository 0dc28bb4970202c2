"""The table of activation magnitudes near the origin of a failure, in execution order: found in a trace, and laid out."""

from collections.abc import Sequence

from dtypedoctor.analysis import analysis_of
from dtypedoctor.diagnosis.incidents import same_call
from dtypedoctor.diagnosis.registry import spec_of
from dtypedoctor.diagnosis.rule import Confidence, Finding
from dtypedoctor.diagnosis.wording import class_of, module_name
from dtypedoctor.dtypes import headroom, short_name
from dtypedoctor.report.document import Bar, Line, Look, Paragraph, Section, Table, Words, named
from dtypedoctor.report.model import Report, StripRow
from dtypedoctor.text import ABSENT, count, fill, limit, number
from dtypedoctor.trace.events import Op, Sample, Site
from dtypedoctor.trace.model import Trace

BEFORE, AFTER = 6, 4
"""How many modules are shown before and after the first one that is not finite."""


def magnitude_section(report: Report) -> Section:
    """Lay out the strip, which needs no trace."""
    rows = report.strip
    near = "origin" if any(row.is_origin for row in rows) else "first inf or NaN"  # the origin only where one is known
    title = f"Activation magnitudes near the {near} (execution order, log scale)"
    if not rows:
        return Section(title, ())
    names = {row.fqn for row in rows}
    cells = tuple(_cells(row, names) for row in rows)
    table = Table(("", "module", "dtype", "absmax", "in its range", ""), cells)
    return Section(title, (table, Paragraph(_scale(rows), Look.DIM)), "strip", "Magnitudes")


def _cells(row: StripRow, names: set[str]) -> tuple[Line, ...]:
    look = Look.BAD if row.is_origin else Look.PLAIN
    note = _note(row)
    filled = 1.0 if row.num_inf and row.absmax is not None else fill(row.absmax, row.dtype)
    return (
        Words("▶" if row.is_origin else "", look),
        _name(row, names),
        short_name(row.dtype),
        _absmax(row),
        Bar(filled, bad=bool(note)),
        Words(note, look),
    )


def _name(row: StripRow, names: set[str]) -> Line:
    """Name a module, with its class only where the name is a number or the failure originates there: that keeps the table narrow."""
    name = named(module_name(row.fqn, names) or row.cls or "(model)")
    tells_class = row.fqn and row.cls and (row.is_origin or row.fqn.replace(".", "").isdigit())
    return (name, Words(f" ({row.cls})", Look.DIM)) if tells_class else name


def _scale(rows: Sequence[StripRow]) -> str:
    """Say what the bars mean, with the largest value of each dtype that occurs."""
    limits = {short_name(row.dtype): number(limit(row.dtype)) for row in rows if limit(row.dtype) is not None}
    ends = ", ".join(f"{dtype} {largest}" for dtype, largest in limits.items())
    return f"Bars: log scale, from the dtype's smallest normal value to its max ({ends or ABSENT})."


def _absmax(row: StripRow) -> str:
    """Give the largest finite magnitude; what is there instead where none is finite."""
    if row.absmax == 0 and (row.num_nan or row.num_inf):
        return "NaN" if row.num_nan else "inf"
    return number(row.absmax)


def _note(row: StripRow) -> str:
    notes = ["ORIGIN"] if row.is_origin else []
    notes += [f"{count(row.num_inf)} inf"] if row.num_inf else []
    notes += [f"{count(row.num_nan)} NaN"] if row.num_nan else []
    return ", ".join(notes) or ("" if row.absmax is not None else ABSENT)


def origin_strip(trace: Trace, finding: Finding | None) -> tuple[StripRow, ...]:
    """The modules that returned just before and after the failure; empty where all is finite.

    The failure is the first non-finite value: where dtypes disagree, magnitudes mean nothing, and there is no strip. An
    origin that is not itself among the modules shown (the op lies between two children of it) has a row of its own before
    the first bad one.
    """
    first = analysis_of(trace).first_nonfinite
    if first is None:
        return ()
    if (
        finding is not None
    ):  # one about something else, or where it was only seen first, does not say where the value comes from
        only_seen = finding.op is None and finding.confidence is Confidence.POSSIBLE
        finding = finding if spec_of(finding.id).nonfinite and not only_seen else None
    anchor = first[0]
    around = _distinct(same_call(trace, anchor), anchor)
    place = next(i for i, (s, _) in enumerate(around) if s is anchor)
    shown = around[max(0, place - BEFORE) : place + AFTER + 1]
    rows = [_row(s, site, finding) for s, site in shown]
    if finding is not None and finding.fqn and not any(row.is_origin for row in rows):
        at = next(i for i, (s, _) in enumerate(shown) if s is anchor)
        rows.insert(at, _origin_row(trace, finding))
    return tuple(rows)


def _distinct(measured: list[tuple[Sample, Site]], keep: Sample) -> list[tuple[Sample, Site]]:
    """Leaves out containers that return what their last child has returned, unless it is the one to keep."""
    distinct: list[tuple[Sample, Site]] = []
    last_name, last_values = "", tuple[object, ...]()
    for sample, site in measured:
        values = (sample.absmax, sample.num_nan, sample.num_inf, site.dtype, site.shape)
        if sample is keep or not last_name.startswith(site.fqn) or values != last_values:
            distinct.append((sample, site))
            last_name, last_values = site.fqn, values
    return distinct


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
