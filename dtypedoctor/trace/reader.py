"""Reads a trace back, whole or torn."""

import gc
import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast

from dtypedoctor.errors import UsageError
from dtypedoctor.trace.canonical import CanonicalNames
from dtypedoctor.trace.events import KINDS, SCHEMA, End, Environment, Header, Op, Root, Sample, Site, TensorNote
from dtypedoctor.trace.samples import BATCH, SAMPLES_PREFIX, parse_line, parse_lines
from dtypedoctor.trace.writer import CURSOR, CURSOR_FORMAT, CURSOR_MAGIC, EVENTS

Record = TypeVar("Record")


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
    """

    records: tuple[Any, ...]
    samples: tuple[Sample, ...]
    sites: dict[int, Site]
    damage: tuple[str, ...] = ()
    cursor: Cursor | None = None

    def all(self, kind: type[Record]) -> tuple[Record, ...]:
        """All records of one kind, in file order."""
        return cast(tuple[Record, ...], self._by_kind.get(kind, ()))

    def last(self, kind: type[Record]) -> Record | None:
        """The last record of one kind."""
        found = self.all(kind)
        return found[-1] if found else None

    @cached_property
    def _by_kind(self) -> dict[type[Any], tuple[Any, ...]]:
        groups: dict[type[Any], list[Any]] = {}
        for record in self.records:
            groups.setdefault(type(record), []).append(record)
        return {kind: tuple(found) for kind, found in groups.items()}

    @property
    def header(self) -> Header | None:
        """The header, if it was written."""
        return self.last(Header)

    @property
    def end(self) -> End | None:
        """The end record; None if the worker died."""
        return self.last(End)

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, devices and settings of the worker."""
        found = self.last(Environment)
        return dict(found.values) if found else {}

    @property
    def usable(self) -> bool:
        """Whether anything can be said about the run at all."""
        return self.header is not None


def read_trace(directory: Path) -> Trace:
    """Reads every whole record of the trace in ``directory``.

    A torn last line is normal after a kill and not reported as damage. Lines in the middle that cannot be read, records
    of unknown kind, and missing fields are counted in ``damage`` and skipped.

    Raises:
        UsageError: there is no trace, or it was written by a newer version of the format.
    """
    path = directory / EVENTS
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"{directory}: no trace here ({error.strerror})", "Give a directory that a run has left."
        ) from error
    loader = _Loader()
    whole, _, _torn = data.rpartition(b"\n")
    with _without_collector():  # nothing here is garbage, and looking for it takes a third of the time
        for number, line in enumerate(whole.split(b"\n") if whole else (), start=1):
            loader.line(number, line)
        loader.flush()
    loader.samples.sort(key=attrgetter("n"))
    names = CanonicalNames([record for record in loader.records if isinstance(record, Root)])
    records = tuple(map(names.of, loader.records)) if names else tuple(loader.records)
    sites = {number: names.of(site) for number, site in loader.sites.items()} if names else loader.sites
    return Trace(
        records=records,
        samples=tuple(loader.samples),
        sites=sites,
        damage=tuple(loader.damage()),
        cursor=_read_cursor(directory / CURSOR, sites),
    )


@contextmanager
def _without_collector() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Loader:
    def __init__(self) -> None:
        self.records: list[Any] = []
        self.samples: list[Sample] = []
        self.sites: dict[int, Site] = {}
        self._bad: list[int] = []
        self._unknown: dict[str, int] = {}
        self._waiting: list[tuple[int, bytes]] = []

    def line(self, number: int, line: bytes) -> None:
        if not line.startswith(SAMPLES_PREFIX):
            self._one(number, line)
            return
        self._waiting.append((number, line))
        if len(self._waiting) == BATCH:
            self.flush()

    def flush(self) -> None:
        """Parses the lines of samples that wait to be parsed together."""
        waiting, self._waiting = self._waiting, []
        try:
            self.samples += parse_lines([line for _, line in waiting])
        except (ValueError, TypeError, RecursionError):
            for number, line in waiting:
                self._one(number, line)

    def _one(self, number: int, line: bytes) -> None:
        try:
            value = json.loads(line)
            if isinstance(value, list):
                self.samples.extend(list(parse_line(value)))
            else:
                self._object(value)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            self._bad.append(number)

    def _object(self, value: dict[str, Any]) -> None:
        name = value.pop("e")
        kind = KINDS.get(name)
        if kind is None:
            self._unknown[str(name)] = self._unknown.get(str(name), 0) + 1
            return
        record = _decode(kind, value)
        if kind is Header and record.schema > SCHEMA:
            raise UsageError(
                f"this trace has schema {record.schema}, newer than {SCHEMA}", "Update dtypedoctor to read it."
            )
        if kind is Site:
            self.sites[record.id] = record
        self.records.append(record)

    def damage(self) -> Iterator[str]:
        if self._bad:
            shown = ", ".join(map(str, sorted(self._bad)[:5])) + (", …" if len(self._bad) > 5 else "")
            yield f"{len(self._bad)} unreadable line(s): {shown}"
        for name, count in self._unknown.items():
            yield f"{count} record(s) of unknown kind {name[:40]!r}"


def _decode(kind: type[Any], value: dict[str, Any]) -> Any:
    known = {f.name: f for f in fields(kind)}
    arguments = {key: item for key, item in value.items() if key in known}
    if kind is Op:
        arguments["inputs"] = [_decode(TensorNote, v) for v in arguments.get("inputs", [])]
        arguments["outputs"] = [_decode(TensorNote, v) for v in arguments.get("outputs", [])]
    for name, f in known.items():
        if name not in arguments and f.type in _EMPTY:
            arguments[name] = _EMPTY[f.type]()
    return kind(**arguments)


# The writer leaves out empty values; these are put back for fields without a default of their own.
_EMPTY: dict[Any, Any] = {list[int]: list, list[str]: list, str: str, bool: bool}


def _read_cursor(path: Path, sites: dict[int, Site]) -> Cursor | None:
    try:
        n, step, call, site, magic = CURSOR_FORMAT.unpack(path.read_bytes()[: CURSOR_FORMAT.size])
    except (OSError, struct.error):  # a missing or short cursor file only means that no module was entered
        return None
    if magic != CURSOR_MAGIC:
        return None
    return Cursor(n=n, step=step, call=call, site=sites.get(site))
