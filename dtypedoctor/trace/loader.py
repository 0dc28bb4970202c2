"""Turns lines into records, and counts what cannot be turned."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from dtypedoctor.errors import UsageError
from dtypedoctor.trace.decode import decode
from dtypedoctor.trace.events import KINDS, SCHEMA, Header, Observation, Sample, Site
from dtypedoctor.trace.records import from_disk
from dtypedoctor.trace.samples import BATCH, SAMPLES_PREFIX, parse_line, parse_lines
from dtypedoctor.trace.seal import open_lines, unreadable
from dtypedoctor.unpatched import from_json

__all__ = ["DAMAGED", "Loader"]

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
