"""What a worker left behind: a trace as a value, and the totals of a long run of which no single measurement is kept."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

from dtypedoctor.trace.events import (
    Correction,
    End,
    Environment,
    Header,
    Metric,
    Observed,
    Op,
    Raised,
    Sample,
    ScalerState,
    Site,
    Stopped,
)

Record = TypeVar("Record")
Derived = TypeVar("Derived")

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
                for name, value in record.values.items():
                    self.metrics.setdefault(name, Total()).add(record.step, value)
                for name in record.nonfinite:
                    self.metrics.setdefault(name, Total()).add(record.step, None, num_nan=1)
            elif isinstance(record, ScalerState):
                self.skipped += record.skipped

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The module that was entered last, and when."""

    n: int
    step: int
    call: int
    site: Site | None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a worker left behind.

    Attributes:
        records: every whole record that is not a sample, in file order.
        samples: every measured tensor, in the order in which it was measured (by ``n``).
        sites: the places where samples were taken, by id.
        damage: a sentence for each part of the file that could not be read.
        cursor: the module entered last, where the worker got that far.
        collectives: how many collectives to which every rank sends something were entered; None where none was.
        called: how many collectives and messages were called on each channel, in the order of their first records.
        stopped: why the recording ended before the process did; None where it did not.
        folded: totals of the steps of a long run of which no single measurement is kept; None where all are.
        by_call: whether the numbers of steps are those of outermost module calls, because the process made no optimizer step.
    """

    records: tuple[Any, ...]
    samples: tuple[Sample, ...]
    sites: dict[int, Site]
    damage: tuple[str, ...] = ()
    cursor: Cursor | None = None
    collectives: int | None = None
    called: tuple[int, ...] = ()
    stopped: Stopped | None = None
    folded: Folded | None = None
    by_call: bool = False

    def moment(self, number: int) -> str:
        """What the number of a step says, e.g. ``step 3`` or, where steps are counted by calls, ``call 3``; the first is of step 1."""
        return f"{'call' if self.by_call and number > 1 else 'step'} {number}"

    def when(self, raised: Raised) -> str:
        """When an exception was raised: ``in step 3 (backward)``, or ``after step 2`` where nothing of step 3 had begun.

        The number of the step grows when an optimizer has stepped; a model that no step has called since is not in the next one.
        """
        entered = self.cursor
        idle = raised.phase == "forward" and not raised.modules and raised.step > 1
        if idle and entered is not None and entered.call == raised.call and entered.step < raised.step:
            return f"after {self.moment(raised.step - 1)}"
        return f"in {self.moment(raised.step)} ({raised.phase})"

    def measured(self) -> Iterator[tuple[Sample, Site]]:
        """Every sample with the place where it was taken, in order."""
        sites = self.sites
        return ((sample, sites[sample.site]) for sample in self.samples if sample.site in sites)

    def all(self, kind: type[Record]) -> tuple[Record, ...]:
        """All records of one kind, in file order."""
        return cast(tuple[Record, ...], self._by_kind.get(kind, ()))

    def observed(self, what: type[Record]) -> "tuple[Observed[Record], ...]":
        """Everything that was observed of one kind of :mod:`dtypedoctor.trace.records`, in file order."""
        return cast(tuple[Observed[Record], ...], self._by_what.get(what, ()))

    def last(self, kind: type[Record]) -> Record | None:
        """The last record of one kind."""
        found = self.all(kind)
        return found[-1] if found else None

    def once(self, derive: "Callable[[Trace], Derived]") -> Derived:
        """What ``derive`` makes of this trace. It is made when it is first asked for, and kept with the trace."""
        if derive not in self._derived:
            self._derived[derive] = derive(self)
        return cast(Derived, self._derived[derive])

    @cached_property
    def _derived(self) -> dict[Callable[["Trace"], Any], Any]:
        return {}

    @cached_property
    def _by_kind(self) -> dict[type[Any], tuple[Any, ...]]:
        groups: dict[type[Any], list[Any]] = {}
        for record in self.records:
            groups.setdefault(type(record), []).append(record)
        return {kind: tuple(found) for kind, found in groups.items()}

    @cached_property
    def _by_what(self) -> dict[type[Any], tuple[Any, ...]]:
        groups: dict[type[Any], list[Any]] = {}
        for record in self.all(Observed):
            groups.setdefault(type(record.what), []).append(record)
        return {what: tuple(found) for what, found in groups.items()}

    @property
    def header(self) -> Header | None:
        """The header, if it was written."""
        return self.last(Header)

    @property
    def end(self) -> End | None:
        """The end record; None if the worker died."""
        return self.last(End)

    @property
    def rejected(self) -> Op | None:
        """The op that raised the exception which ended the run; None where none did, or where the op trace was not open there."""
        raised = self.last(Raised)
        failed = [op for op in self.all(Op) if op.error is not None]
        return next((op for op in reversed(failed) if raised is not None and str(op.error) in raised.message), None)

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, devices and settings of the worker."""
        found = self.last(Environment)
        return dict(found.values) if found else {}

    @cached_property
    def losses(self) -> dict[int, float]:
        """The losses by step, also those that are not finite."""
        return {
            metric.step: float(metric.values.get("loss", metric.spelled.get("loss", "nan")))
            for metric in self.all(Metric)
            if "loss" in metric.values or "loss" in metric.nonfinite
        }

    @property
    def steps_done(self) -> int:
        """Training steps: as the end record says, else as far as there are numbers of them."""
        if self.end is not None:
            return self.end.steps_completed
        metrics = self.all(Metric)
        return len(metrics) if self.folded is None or not metrics else metrics[-1].step

    @cached_property
    def uncalled_corrections(self) -> tuple[Correction, ...]:
        """The last records of the corrections that were installed and that nothing had called by the end of the run."""
        if self.end is None:
            return ()
        records = self.all(Correction)
        last = {record.id: record for record in records}
        counted = Counter(record.id for record in records)
        return tuple(one for one in last.values() if one.installed and one.hits == 0 and counted[one.id] > 1)

    @property
    def usable(self) -> bool:
        """Whether anything can be said about the run at all."""
        return self.header is not None
