"""Turns lines into records and samples, and counts those that cannot be read. Lines of samples are parsed thousands at a time."""

import gc
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import repeat
from typing import Any

from dtypedoctor.errors import UsageError
from dtypedoctor.trace.events import KINDS, SCHEMA, Header, Observation, Sample, Site
from dtypedoctor.trace.lines import open_lines, unreadable
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
