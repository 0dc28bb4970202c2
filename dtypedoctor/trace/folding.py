"""What is kept of the steps of a long run whose measurements are no longer kept one by one."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from dtypedoctor import unpatched
from dtypedoctor.trace.decode import decode
from dtypedoctor.trace.events import Metric, Sample, ScalerState

__all__ = ["Folded", "Moment", "Total", "from_json", "to_json", "totals_of"]

Moment = tuple[int, int]
"""Step and call."""


@dataclass(slots=True, kw_only=True)
class Total:
    """The measurements of one place, or the values of one metric, in the folded steps.

    Attributes:
        count: how many there were.
        least, most: extremes over the finite ones.
        num_nan, num_inf: elements that were not finite; for a metric, ``num_nan`` counts values that were not.
        first_nonfinite: step of the first that was not finite.
    """

    count: int = 0
    least: float | None = None
    most: float | None = None
    num_nan: int = 0
    num_inf: int = 0
    first_nonfinite: int | None = None

    def add(self, step: int, value: float | None, num_nan: int = 0, num_inf: int = 0) -> None:
        """One more; ``value`` is None where it was not finite itself."""
        self.count += 1
        if value is not None:
            self.least = value if self.least is None or value < self.least else self.least
            self.most = value if self.most is None or value > self.most else self.most
        if num_nan or num_inf:
            self.num_nan += num_nan
            self.num_inf += num_inf
            if self.first_nonfinite is None:
                self.first_nonfinite = step

    def merge(self, later: "Total") -> None:
        """Adds what was counted later."""
        self.count += later.count
        self.least = min((v for v in (self.least, later.least) if v is not None), default=None)
        self.most = max((v for v in (self.most, later.most) if v is not None), default=None)
        self.num_nan += later.num_nan
        self.num_inf += later.num_inf
        if self.first_nonfinite is None:
            self.first_nonfinite = later.first_nonfinite


@dataclass(slots=True, kw_only=True)
class Folded:
    """Everything that is known of folded steps.

    Attributes:
        segments: numbers of the files that were folded.
        spans: first and last moment of each run of folded files, both included.
        sites: totals by the id of the site.
        metrics: totals by the name of the metric.
        skipped: optimizer steps that a gradient scaler skipped.
    """

    segments: list[int] = field(default_factory=list)
    spans: list[tuple[Moment, Moment]] = field(default_factory=list)
    sites: dict[int, Total] = field(default_factory=dict)
    metrics: dict[str, Total] = field(default_factory=dict)
    skipped: int = 0

    def add(self, samples: Iterable[Sample], records: Iterable[Any]) -> None:
        """Counts the records of a file."""
        for s in samples:
            total = self.sites.get(s.site) or self.sites.setdefault(s.site, Total())
            total.add(s.step, s.absmax, s.num_nan, s.num_inf)
        for record in records:
            if isinstance(record, Metric):
                self._add_metric(record)
            elif isinstance(record, ScalerState):
                self.skipped += record.skipped

    def _add_metric(self, metric: Metric) -> None:
        for name, value in metric.values.items():
            self.metrics.setdefault(name, Total()).add(metric.step, value)
        for name in metric.nonfinite:
            self.metrics.setdefault(name, Total()).add(metric.step, None, num_nan=1)

    def merge(self, later: "Folded") -> None:
        """Adds what follows."""
        adjacent = bool(self.segments and later.segments and self.segments[-1] + 1 == later.segments[0])
        self.segments += later.segments
        if adjacent and self.spans and later.spans:
            self.spans[-1] = (self.spans[-1][0], max(self.spans[-1][1], later.spans[0][1]))
        else:
            self.spans += later.spans
        for site, total in later.sites.items():
            self.sites.setdefault(site, Total()).merge(total)
        for name, total in later.metrics.items():
            self.metrics.setdefault(name, Total()).merge(total)
        self.skipped += later.skipped

    def holds(self, moment: Moment) -> bool:
        """Whether what was measured then has been folded, all or a part of it."""
        return any(first <= moment <= last for first, last in self.spans)

    def describe(self) -> str:
        """What was folded, in words."""
        where = ", ".join(_span(first, last) for first, last in self.spans)
        bad = [total.first_nonfinite for total in self.sites.values() if total.first_nonfinite is not None]
        what = (
            f"{len(bad)} place(s) were not finite there, first in step {min(bad)}"
            if bad
            else "everything was finite there"
        )
        return f"single measurements of {where}: of these only extremes and counts of each place were kept; {what}"


def _span(first: Moment, last: Moment) -> str:
    if first[0] != last[0]:
        return f"steps {first[0]}–{last[0]}"
    return f"step {first[0]} (calls {first[1]}–{last[1]})"


def to_json(folded: Folded) -> bytes:
    """One line of JSON."""
    return unpatched.to_json({"e": "folded", **asdict(folded)}).encode("ascii")


def from_json(line: bytes) -> Folded:
    """The value that :func:`to_json` has written.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: the line is damaged.
    """
    value = unpatched.from_json(line)
    return Folded(
        segments=[_whole(number) for number in value["segments"]],
        spans=[(_moment(first), _moment(last)) for first, last in value["spans"]],
        sites={int(site): decode(Total, total) for site, total in value["sites"].items()},
        metrics={str(name): decode(Total, total) for name, total in value["metrics"].items()},
        skipped=_whole(value["skipped"]),
    )


def _moment(value: Any) -> Moment:
    step, call = map(_whole, value)
    return step, call


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < math.inf:
        raise ValueError(value)
    return value


def totals_of(samples: Iterable[Sample], records: Iterable[Any], number: int) -> Folded:
    """The totals of one file, number ``number``, which holds at least one sample or record with a step."""
    samples, records = list(samples), [r for r in records if isinstance(r, (Metric, ScalerState))]
    moments = [(s.step, s.call) for s in samples] or [(r.step, 0) for r in records]
    found = Folded(segments=[number], spans=[(min(moments), max(moments))] if moments else [])
    found.add(samples, records)
    return found
