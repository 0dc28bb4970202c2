"""Turns lines into records and samples, and counts those that cannot be read. Lines of samples are parsed thousands at a time.

Of a long run the details of its steps lie in numbered files, of which some are folded into totals."""

import contextlib
import gc
import math
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from itertools import repeat
from pathlib import Path
from typing import Any

from dtypedoctor import unpatched
from dtypedoctor.errors import UsageError
from dtypedoctor.trace.events import KINDS, SCHEMA, Header, Metric, Observation, Sample, ScalerState, Site
from dtypedoctor.trace.lines import Lines, open_lines, seal, unreadable
from dtypedoctor.trace.model import Folded, Moment, Total
from dtypedoctor.trace.records import LARGEST, decode, from_disk
from dtypedoctor.unpatched import from_json

SAMPLES_PREFIX = b'["s",'
"""How every line of samples begins."""

BATCH = 4096
"""Lines that are worth parsing together; more only take more memory."""

_MAGNITUDE = 4
_TYPES = (int, int, int, int, float, int, int)
_SETTERS = tuple(Sample.__dict__[f.name].__set__ for f in fields(Sample))


def parse_lines(lines: Sequence[bytes]) -> list[Sample]:
    """The samples of many lines, in file order.

    Raises:
        ValueError: at least one line is damaged; :func:`parse_line` tells which.
    """
    values = from_json(b"[" + b",".join(lines) + b"]")
    if len(values) != len(lines):  # two damaged lines may complete each other
        raise ValueError("a line is damaged")
    rows = [row for value in values for row in value[4]]
    widths = set(map(len, rows))
    if not widths <= {2, 4}:
        raise ValueError("a row has the wrong length")
    rare = 4 in widths  # counts of NaN and inf are written only where there are any
    columns: tuple[list[Any], ...] = (
        [number for _, first, _, _, own in values for number in range(first, first + len(own))],
        [step for _, _, step, _, own in values for _ in own],
        [call for _, _, _, call, own in values for _ in own],
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2] if len(row) == 4 else 0 for row in rows] if rare else [0] * len(rows),
        [row[3] if len(row) == 4 else 0 for row in rows] if rare else [0] * len(rows),
    )
    _check(columns if rare else columns[: _MAGNITUDE + 1])
    return _assemble(columns)


def _check(columns: Sequence[list[Any]]) -> None:
    """Rejects numbers that no writer writes; each column is checked as a whole, which takes a tenth of the time."""
    for index, (column, kind) in enumerate(zip(columns, _TYPES, strict=False)):
        if not set(map(type, column)) <= {kind}:
            raise ValueError("a number has the wrong type")
        if index < _MAGNITUDE and column and min(column) < 0:
            raise ValueError("a count is negative")
        if not column:
            continue
        if index == _MAGNITUDE:
            if not 0.0 <= min(column) <= max(column) < math.inf:
                raise ValueError("a magnitude is none")
        elif not -LARGEST < min(column) <= max(column) < LARGEST:
            raise ValueError("a number is too large")


def parse_line(value: list[Any]) -> Iterator[Sample]:
    """The samples of one decoded line.

    Raises:
        ValueError, TypeError, IndexError: the line is damaged.
    """
    tag, n, step, call, rows = value
    if tag != "s":
        raise ValueError(tag)
    for i, row in enumerate(rows):
        nan, inf = row[2:] or (0, 0)
        whole = (n + i, step, call, row[0], nan, inf)
        if any(type(number) is not int or not -LARGEST < number < LARGEST for number in whole):
            raise ValueError("a number has the wrong type, or is too large")
        if type(row[1]) not in (int, float) or not 0.0 <= row[1] < math.inf:
            raise ValueError("a magnitude is none")
        yield Sample(n=n + i, step=step, call=call, site=row[0], absmax=float(row[1]), num_nan=nan, num_inf=inf)


def _assemble(columns: Sequence[list[Any]]) -> list[Sample]:
    # The constructor of a frozen dataclass takes a microsecond a field; filling the slots column by column takes a tenth.
    samples = list(map(Sample.__new__, repeat(Sample, len(columns[0]))))
    for setter, column in zip(_SETTERS, columns, strict=True):
        deque(map(setter, samples, column), maxlen=0)
    return samples


DAMAGED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError)
"""What decoding a damaged line may raise."""


class Loader:
    """Collects the records of one file after another.

    Attributes:
        records: every whole record that is not a sample, in the order in which it was written.
        samples: every measured tensor, in the same order.
        sites: places by id.
    """

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.samples: list[Sample] = []
        self.sites: dict[int, Site] = {}
        self._bad: list[int] = []
        self._unknown: dict[str, int] = {}

    def file(self, data: bytes, lines: int | None = None) -> list[str]:
        """Reads a file; returns a sentence for each part of it that could not be read.

        Args:
            data: what is in it.
            lines: how many lines it has at least, where that is known.

        Raises:
            UsageError: it was written by a newer version of the format.
        """
        with without_collector():  # nothing here is garbage, and looking for it takes a third of the time
            opened = open_lines(data, lines or 0)
            self._lines(opened.lines)
        return [*opened.damage(), *self._own_damage()]

    def _lines(self, lines: Iterable[tuple[int, bytes]]) -> None:
        waiting = []  # lines of samples are parsed together; a long trace is little else
        for numbered in lines:
            if not numbered[1].startswith(SAMPLES_PREFIX):
                self._one(*numbered)
                continue
            waiting.append(numbered)
            if len(waiting) == BATCH:
                self._together(waiting)
                waiting = []
        self._together(waiting)

    def _together(self, waiting: list[tuple[int, bytes]]) -> None:
        try:
            self.samples += parse_lines([line for _, line in waiting])
        except DAMAGED:
            for number, line in waiting:
                self._one(number, line)

    def _one(self, number: int, line: bytes) -> None:
        try:
            value = from_json(line)
            if isinstance(value, list):
                self.samples.extend(list(parse_line(value)))
            else:
                self._object(value)
        except DAMAGED:
            self._bad.append(number)

    def _object(self, value: dict[str, Any]) -> None:
        name = value.pop("e")
        kind = KINDS.get(name)
        if kind is None:
            self._unknown[str(name)] = self._unknown.get(str(name), 0) + 1
            return
        if kind is Header:
            _refuse_newer(value.get("schema", SCHEMA))
        record = decode(kind, value)
        if kind is Site:
            self.sites[record.id] = record
        self.records.append(from_disk(record) if kind is Observation else record)

    def _own_damage(self) -> Iterator[str]:
        bad, unknown = self._bad, self._unknown
        self._bad, self._unknown = [], {}
        yield from unreadable(bad)
        for name, count in unknown.items():
            yield f"{count} record(s) of unknown kind {name[:40]!r}"


def _refuse_newer(schema: Any) -> None:
    if type(schema) is int and schema > SCHEMA:
        shown = str(schema) if schema < 10**6 else "of many digits"
        raise UsageError(f"this trace has schema {shown}, newer than {SCHEMA}", "Update dtypedoctor to read it.")


@contextmanager
def without_collector() -> Iterator[None]:
    """No garbage collection inside."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
        self._limit: float = Sizes.head
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
