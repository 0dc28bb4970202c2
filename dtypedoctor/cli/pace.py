"""How long each part of a run takes, and how long the rest may take: as long as in the last run of the same kind.

Each run directory keeps the seconds of its own parts in ``timing.json``; those of earlier runs are read from the run directories
beside it. Nothing is kept elsewhere, and nothing is estimated where no run of the same kind lies there.
"""

import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

from dtypedoctor.foreign_files import parse_json, read_file, write_file
from dtypedoctor.runner.directories import TIMING
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.unpatched import to_json

_MOST_READ = 50
"""Run directories of which the file is read, newest first."""


class Pace:
    """The seconds of a run's parts, so far and in the last run of the same kind.

    Args:
        directory: of this run.
        verb: what is done with the scenario; a bisection is no run.
        scenario: two runs are of the same kind if the same is done with equal scenarios.
        in_matrix: the run is one of several scenarios, so those of the same kind lie in other directories of several.
    """

    def __init__(self, directory: Path, verb: str, scenario: Scenario, *, in_matrix: bool = False) -> None:
        self._directory = directory
        self._kind = hashlib.sha256(f"{verb} {scenario.model_dump_json()}".encode()).hexdigest()[:16]
        self._took: dict[str, float] = {}
        self._part = ""
        self._began = self._part_began = time.monotonic()
        self._earlier = self._read_earlier(in_matrix=in_matrix)

    @property
    def total(self) -> float | None:
        """Seconds that the last run of the same kind took; None where there is none."""
        return sum(self._earlier.values()) if self._earlier else None

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._began

    @property
    def of_part(self) -> float:
        """Seconds since this part began."""
        return time.monotonic() - self._part_began

    def begin(self, part: str) -> None:
        """A part begins, and the one before it has ended."""
        self.end()
        self._part, self._part_began = part, time.monotonic()

    def end(self) -> None:
        """The part has ended."""
        if self._part:
            self._took[self._part] = self._took.get(self._part, 0.0) + self.of_part
        self._part = ""

    def left(self) -> float | None:
        """Seconds that the run may still take; None where that is not known, or where this run takes longer than the last."""
        if not self._earlier:
            return None
        parts = list(self._earlier)
        reached = [parts.index(part) for part in (*self._took, self._part) if part in self._earlier]
        later = parts[max(reached, default=-1) + 1 :]
        rest = sum(self._earlier[part] for part in later)
        if self._part in self._earlier:
            rest += max(0.0, self._earlier[self._part] - self._took.get(self._part, 0.0) - self.of_part)
        return rest or None

    def keep(self) -> None:
        """Writes down what each part took, for the next run of the same kind."""
        self.end()
        found = {"kind": self._kind, "seconds": {part: round(took, 3) for part, took in self._took.items()}}
        with contextlib.suppress(OSError):  # the disk is full: only an estimate is lost
            write_file(self._directory / TIMING, to_json(found))

    def _read_earlier(self, *, in_matrix: bool) -> dict[str, float]:
        for path in self._files(in_matrix=in_matrix):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                found = parse_json(read_file(path))
                if found["kind"] == self._kind:
                    return {str(part): float(seconds) for part, seconds in found["seconds"].items()}
        return {}

    def _files(self, *, in_matrix: bool) -> list[Path]:
        """The files of runs that lie beside this one, newest first."""
        beside = self._directory.absolute().parent
        pattern = f"*/{self._directory.name}/{TIMING}" if in_matrix else f"*/{TIMING}"
        found = dict(_with_age((beside.parent if in_matrix else beside).glob(pattern)))
        return sorted(found, key=lambda path: -found[path])[:_MOST_READ]


def _with_age(paths: Iterator[Path]) -> Iterator[tuple[Path, float]]:
    with contextlib.suppress(OSError):  # a folder that may not be read, or that has just gone
        for path in paths:
            yield path, path.stat().st_mtime
