"""Makes runs, never one that is done already, and logs what was asked and what came of it: so a bisection goes on after any end."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dtypedoctor.analysis import ending_of
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.processes import led_by_origin
from dtypedoctor.foreign_files import append_file, parse_json, read_file, read_head
from dtypedoctor.lab.scenarios.model import Request, Scenario
from dtypedoctor.redaction.redact import REQUEST, public_text
from dtypedoctor.runner.directories import clear
from dtypedoctor.runner.run import EXIT, Run, WorkerExit, collect


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished run.

    Attributes:
        run: what it left, or the reason why it could not be done.
        repeated: it had been done before, and was read from disk.
    """

    run: Run | UsageError
    repeated: bool


class ProbeRunner:
    """Makes runs in directories below one; what lies there finished is not run again.

    Args:
        directory: the run directory.
        run: makes a run in a directory that does not exist yet.
        journal: is told each run that was really made.
    """

    def __init__(self, directory: Path, run: Callable[[Request, Path], Run], journal: "Journal") -> None:
        self.directory = directory
        self._run = run
        self._journal = journal
        self.runs = 0
        """How many requests were answered, from disk or by a run."""

    def run(self, request: Request, label: str = "") -> Run:
        """Makes one run; see :meth:`ask`.

        Raises:
            UsageError: the scenario cannot be run at all.
        """
        done = self.ask(request, label=label)
        if isinstance(done.run, UsageError):
            raise done.run
        return done.run

    def ask(self, request: Request, *, label: str = "", attempt: int = 0) -> Done:
        """The run of ``request``, from disk or made now.

        Args:
            request: what to run.
            label: name of the directory; probes, which have none, are named after what is asked of them.
            attempt: another number runs the same request anew.
        """
        digest = hashlib.sha256(request.to_text().encode()).hexdigest()[:16]
        name = label or f"probes/{digest}" + (f"-{attempt}" if attempt else "")
        place = self.directory / name
        self.runs += 1
        known = _reopened(place, request)
        if known is not None:
            return Done(run=known, repeated=True)
        clear(place)  # what an interruption has left there
        run: Run | UsageError
        try:
            run = led_by_origin(self._run(request, place))
            ended = ending_of(run).words
        except UsageError as error:
            run, ended = error, error.message
        self._journal.note("run", place=name, ended=ended)
        return Done(run=run, repeated=False)


def _is_finished(place: Path, request: Request) -> bool:
    try:
        _exit(place)
        return read_file(place / REQUEST).decode("utf-8") == public_text(request.to_text())
    except (OSError, ValueError, TypeError):
        return False


def _exit(place: Path) -> WorkerExit:
    return WorkerExit(**parse_json(read_file(place / EXIT)))


def _reopened(place: Path, request: Request) -> Run | UsageError | None:
    """What a finished run of ``request`` has left; None where there is none, or a full disk ended its recording, so that it has to be made again."""
    try:
        run = collect(place, _exit(place)) if _is_finished(place, request) else None
    except UsageError as error:
        return error
    return run if run is not None and all(one.trace.stopped is None for one in run.processes) else None


JOURNAL = "bisection.jsonl"
SCHEMA = 1

_LONGEST = 1 << 20
"""Bytes of the first line, which holds a scenario."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a bisection was asked to do.

    Attributes:
        scenario: the scenario under bisection.
        tolerance: the accepted difference, where it was given.
    """

    scenario: Scenario
    tolerance: float | None


class Journal:
    """Appends to the log; each line reaches the kernel as a whole, so that nothing but a power cut loses it.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / JOURNAL

    def begin(self, asked: Asked) -> None:
        """The first line.

        Raises:
            FileExistsError: there is a log already.
        """
        with self._path.open("xb", buffering=0) as file:
            file.write(_line({
                "schema": SCHEMA,
                "scenario": asked.scenario.model_dump(mode="json", exclude_defaults=True),
                "tolerance": asked.tolerance,
            }))  # fmt: skip

    def note(self, event: str, **values: Any) -> None:
        """Appends one event; without room for it the log lacks it, and nothing else is lost."""
        with contextlib.suppress(OSError), append_file(self._path) as file:
            file.write(_line({"event": event, **values}))

    def asked(self) -> Asked:
        """What the log's first line says.

        Raises:
            UsageError: there is no log, or it cannot be read.
        """
        try:
            first = parse_json(read_head(self._path, _LONGEST).partition(b"\n")[0])
            if first["schema"] > SCHEMA:
                raise UsageError(f"{self._path}: written by a newer version", "Update dtypedoctor to resume it.")
            return Asked(
                scenario=Scenario.model_validate(first["scenario"]),
                tolerance=first["tolerance"],
            )
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            raise UsageError(
                f"{self._path.parent}: no bisection to resume here",
                "Pass --resume the run directory of an interrupted bisection.",
            ) from error


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
