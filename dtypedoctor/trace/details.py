"""Keeps the trace of a long run bounded: what each step leaves goes to numbered files, of which most are folded into totals.

The first steps stand in the trace's main file. When that has become large, the next training step begins the file
``detail-000001.jsonl``, and so on. Kept are the last files, and those around events; of the others a file ``folded.json``
holds the totals (:mod:`dtypedoctor.trace.folding`). It is replaced as a whole before the file that went into it is removed,
and names it, so a process may be killed at any moment between the two.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtypedoctor.trace.folding import Folded, Moment, to_json, totals_of
from dtypedoctor.trace.lines import Lines
from dtypedoctor.trace.seal import seal

__all__ = ["FOLDED", "PATTERN", "DetailFiles", "Sizes", "detail_number", "detail_path"]

FOLDED = "folded.json"
PATTERN = "detail-*.jsonl"


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


def detail_path(directory: Path, number: int) -> Path:
    """Where file ``number`` lies."""
    return directory / f"detail-{number:06d}.jsonl"


def detail_number(path: Path) -> int | None:
    """The number of a file that :func:`detail_path` has named; None for any other."""
    digits = path.stem.removeprefix("detail-")
    return int(digits) if digits.isdecimal() and len(digits) < 10 else None


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
        self._closed: deque[tuple[int, Lines]] = deque()
        self._kept = 0
        self._folded = Folded()
        self._lock = threading.Lock()

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

    def close(self) -> None:
        """Closes the files that are open, the main one aside."""
        for _, lines in self._closed:
            lines.close()
        if self.number:
            self.current.close()

    def _rotate(self) -> None:
        following = Lines(detail_path(self._directory, self.number + 1))
        if self.number:
            self._closed.append((self.number, self.current))
        self.current = following  # another thread may still be writing to the one before
        self.number += 1
        self._limit = Sizes.file
        while len(self._closed) > Sizes.last:
            number, lines = self._closed.popleft()
            lines.close()
            if self._eventful & {number - 1, number, number + 1} and self._kept < Sizes.around_events:
                self._kept += 1
            else:
                self._fold(number)

    def _fold(self, number: int) -> None:
        path = detail_path(self._directory, number)
        try:
            samples, records = self._read(path)
        except FileNotFoundError:  # taken away by somebody: what was in it is lost, and the reader sees the gap
            return
        self._folded.merge(totals_of(samples, records, number))
        part = self._directory / (FOLDED + ".part")
        part.write_bytes(seal(to_json(self._folded), 1) + b"\n")
        os.replace(part, self._directory / FOLDED)
        path.unlink()
