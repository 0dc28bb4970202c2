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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dtypedoctor import unpatched
from dtypedoctor.trace.events import Metric, Sample, ScalerState
from dtypedoctor.trace.lines import Lines, seal
from dtypedoctor.trace.model import Folded, Moment, Total
from dtypedoctor.trace.records import decode

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
