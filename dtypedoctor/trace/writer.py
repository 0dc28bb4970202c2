"""Writes a trace: one line per record, each handed to the kernel as a whole, so that nothing but a power cut loses it."""

import json
import mmap
import struct
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from dtypedoctor.trace.events import NAMES

EVENTS = "events.jsonl"
CURSOR = "cursor.bin"
CURSOR_FORMAT = struct.Struct("<QIIII")
"""Sequence number, step, call, site, magic: where the process is at this moment."""
CURSOR_MAGIC = 0xD7D0C708

SampleRow = tuple[int, float, int, int]
"""site id, absmax over finite elements, number of NaN, number of inf."""


def encode(record: Any) -> dict[str, Any]:
    """The JSON object of a record; fields at their default (empty, False, None) are left out of nested notes."""
    return {"e": NAMES[type(record)], **_plain(record)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(v) for f in fields(value) if not _omitted(v := getattr(value, f.name))}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _omitted(value: Any) -> bool:
    return value is None or value is False or value == [] or value == ""


class TraceWriter:
    """Appends records to ``DIRECTORY/events.jsonl``.

    The file is opened without a buffer and each record is written by one system call, so a process that is killed at
    any moment leaves whole records and at most one torn line at the end.

    Args:
        directory: an existing, writable directory.

    Raises:
        FileExistsError: the directory already holds a trace; a trace is never overwritten.
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._file = (directory / EVENTS).open("xb", buffering=0)
        self._next = 0
        self._cursor = _open_cursor(directory / CURSOR)
        self._disowned = False

    def next_n(self, count: int = 1) -> int:
        """Reserves ``count`` sequence numbers and returns the first."""
        first = self._next
        self._next = first + count
        return first

    def write(self, record: Any) -> None:
        """Appends one record.

        Raises:
            ValueError: the record holds NaN or inf, which JSON cannot.
        """
        self._line(encode(record))

    def write_samples(self, n: int, step: int, call: int, rows: Sequence[SampleRow]) -> None:
        """Appends one line of samples; row i has the sequence number ``n + i`` (reserve them with :meth:`next_n`)."""
        compact = [
            [s, float(f"{a:.7g}"), nan, inf] if nan or inf else [s, float(f"{a:.7g}")] for s, a, nan, inf in rows
        ]
        self._line(["s", n, step, call, compact])

    def mark(self, step: int, call: int, site: int) -> None:
        """Notes, in memory shared with the file system, the module that is being entered (no system call)."""
        if not self._disowned:
            CURSOR_FORMAT.pack_into(self._cursor, 0, self._next, step, call, site, CURSOR_MAGIC)

    def disown(self) -> None:
        """Writes nothing more. For a forked child, whose parent goes on writing the same file."""
        self._disowned = True

    def close(self) -> None:
        """Closes the files; the End record has to be written before."""
        self._file.close()
        self._cursor.close()

    def _line(self, value: Any) -> None:
        if self._disowned:
            return
        line = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
        self._file.write(line.encode("ascii") + b"\n")


def _open_cursor(path: Path) -> mmap.mmap:
    with path.open("xb+") as file:
        file.truncate(CURSOR_FORMAT.size)
        return mmap.mmap(file.fileno(), CURSOR_FORMAT.size)
