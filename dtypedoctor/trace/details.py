"""Keeps the trace of a long run bounded: what each step leaves goes to numbered files, of which most are folded into totals.

The first steps stand in the trace's main file. When that has become large, the next training step begins the file
``detail-000001.jsonl``, and so on. A file that is no longer written to has the number of its lines in its name
(``detail-000001.8192.jsonl``), so that lines cut off from its end are missed. Kept are the last files, and those around events; of the others a file ``folded.json``
holds the totals (:class:`Folded`). It is replaced as a whole before the file that went into it is removed,
and names it, so a process may be killed at any moment between the two.
"""

import contextlib
import math
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtypedoctor import unpatched
from dtypedoctor.trace.decode import decode
from dtypedoctor.trace.events import Metric, Sample, ScalerState
from dtypedoctor.trace.lines import Lines, seal

FOLDED = "folded.json"

_NAME = re.compile(r"detail-([0-9]{1,9})(?:\.([0-9]{1,9}))?\.jsonl")


class Sizes:
    """How much is kept of a long run. Class attributes, so that a test can work with small ones.

    Attributes:
        head: bytes of the main file after which the first other file is begun.
        file: bytes after which the next one is begun.
        last: files that are always kept behind the one that is being written.
        around_events: files that are kept because something happened in them or in one next to them.
    """

    head = 16 << 20
    file = 1 << 20
    last = 4
    around_events = 8


_LONG_STEP = 4
"""A step that is this many files long is divided between two calls of modules."""

ReadDetails = Callable[[Path], tuple[Any, Any]]
"""Samples and records of a file."""


def detail_files(directory: Path) -> dict[int, tuple[Path, int | None]]:
    """The files of details in ``directory`` by number, each with the lines that it must have, None where nobody has said."""
    named = ((path, _NAME.fullmatch(path.name)) for path in sorted(directory.iterdir()))
    return {int(name[1]): (path, int(name[2]) if name[2] else None) for path, name in named if name is not None}


class DetailFiles:
    """Says which file a step's records go to.

    Args:
        directory: where the files lie.
        main: the main file.
        read: reads a file back that is to be folded.
    """

    def __init__(self, directory: Path, main: Lines, read: ReadDetails) -> None:
        self.current = main
        """Where to write now."""
        self.number = 0
        """Number of the current file, 0 for the main one."""
        self._directory = directory
        self._read = read
        self._newest: Moment = (0, 0)
        self._limit = Sizes.head
        self._eventful: set[int] = set()
        self._path = Path()
        self._closed: deque[tuple[int, Path, Lines]] = deque()
        self._kept = 0
        self._folded = Folded()
        self._lock = threading.RLock()  # a signal handler may come here again

    def at(self, step: int, call: int) -> None:
        """Something of this step and outermost call is about to be written.

        Raises:
            OSError: a file cannot be written.
        """
        if (step, call) <= self._newest:
            return
        size = self.current.size
        if size > self._limit and (step > self._newest[0] or size > _LONG_STEP * self._limit):
            with self._lock:
                if self.current.size > self._limit:
                    self._rotate()
        self._newest = (step, call)

    def event(self) -> None:
        """Something worth keeping has happened in the current file."""
        self._eventful.add(self.number)

    def complete(self) -> None:
        """Nothing more will be written. Trouble with the disk is passed over: the name of one file will not say its lines."""
        with contextlib.suppress(OSError):
            if self.number:
                _counted(self._path, self.current)

    def close(self) -> None:
        """Closes the files that are open, the main one aside."""
        for _, _, lines in self._closed:
            lines.close()
        if self.number:
            self.current.close()

    def _rotate(self) -> None:
        path = self._directory / f"detail-{self.number + 1:06d}.jsonl"
        after = Lines(path, anew=True)  # an interruption may have left an empty one
        before, self.current = self.current, after  # another thread may still be writing to the one before
        number, self.number = self.number, self.number + 1
        path_before, self._path = self._path, path
        self._limit = Sizes.file
        if number:
            self._closed.append((number, _counted(path_before, before), before))
        while len(self._closed) > Sizes.last:
            number, path, lines = self._closed.popleft()
            lines.close()
            if self._eventful & {number - 1, number, number + 1} and self._kept < Sizes.around_events:
                self._kept += 1
            else:
                self._fold(number, path)

    def _fold(self, number: int, path: Path) -> None:
        try:
            samples, records = self._read(path)
        except FileNotFoundError:  # taken away by somebody: what was in it is lost, and the reader sees the gap
            return
        self._folded.merge(totals_of(samples, records, number))
        part = self._directory / (FOLDED + ".part")
        part.write_bytes(seal(folded_to_json(self._folded), 1) + b"\n")
        os.replace(part, self._directory / FOLDED)
        path.unlink()


def _counted(path: Path, lines: Lines) -> Path:
    """Puts the number of its lines into the name of a file; the new name.

    Raises:
        OSError: it cannot be renamed.
    """
    counted = path.rename(path.with_suffix(f".{lines.whole}.jsonl"))
    lines.moved(counted)
    return counted


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


def folded_to_json(folded: Folded) -> bytes:
    """One line of JSON."""
    return unpatched.to_json({"e": "folded", **asdict(folded)}).encode("ascii")


def folded_from_json(line: bytes) -> Folded:
    """The value that :func:`folded_to_json` has written.

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
