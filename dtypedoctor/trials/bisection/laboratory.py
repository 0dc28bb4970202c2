"""Runs requests, several at a time, and never one that is done already."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import parse_json, read_file
from dtypedoctor.redaction.redact import public_text
from dtypedoctor.runner.directories import clear
from dtypedoctor.runner.run import EXIT, Run, WorkerExit, collect
from dtypedoctor.scenario.request import REQUEST, Request

__all__ = ["Done", "Laboratory", "Start", "Started"]

POLL_SECONDS = 0.05


class Started(Protocol):
    """A worker that may still be running."""

    def wait(self, seconds: float) -> bool:
        """Waits at most so long; whether it has ended."""

    def stop(self) -> None:
        """Ends it."""

    def collect(self) -> Run:
        """What it has left; a UsageError where the scenario cannot be run at all."""


Start = Callable[[Request, Path, int], Started]
"""Starts a worker in a directory that does not exist yet; the number says which of those that run at a time it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A finished run.

    Attributes:
        index: its place among those that were asked for.
        run: what it left, or the reason why it could not be done.
        repeated: it had been done before, and was read from disk.
    """

    index: int
    run: Run | UsageError
    repeated: bool


class Laboratory:
    """Runs requests in directories below one; what lies there finished is not run again, so that it can go on after any end.

    Args:
        directory: the run directory.
        start: starts a worker.
        width: most workers at a time.
        tick: called a few times a second while workers run.
        note: called with each run that was really made, and its directory's name below the run directory.
    """

    def __init__(
        self,
        directory: Path,
        start: Start,
        width: int,
        tick: Callable[[], None] = lambda: None,
        note: Callable[[str, Run | UsageError], None] = lambda place, run: None,
    ) -> None:
        self.directory = directory
        self._start = start
        self.width = width
        self._tick = tick
        self._note = note
        self.runs = 0
        """How many requests were answered, from disk or by a run."""

    def run(self, request: Request, label: str = "") -> Run:
        """Runs one request; see :meth:`run_all`.

        Raises:
            UsageError: the scenario cannot be run at all.
        """
        done = next(self.run_all([request], label=label))
        if isinstance(done.run, UsageError):
            raise done.run
        return done.run

    def run_all(self, requests: Sequence[Request], *, label: str = "", attempt: int = 0) -> Iterator[Done]:
        """Runs requests that do not depend on each other, and gives each as it ends.

        Args:
            requests: what to run.
            label: name of the directory; probes, which have none, are named after what is asked of them.
            attempt: another number runs the same request anew.
        """
        waiting: deque[int] = deque()
        places = [self._place(request, label, attempt) for request in requests]
        for index, place in enumerate(places):
            self.runs += 1
            found = _reopened(place) if _is_finished(place, requests[index]) else None
            if found is not None:
                yield Done(index=index, run=found, repeated=True)
            else:
                clear(place)  # what an interruption has left there
                waiting.append(index)
        running: dict[int, tuple[int, Started]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.width:
                    index = waiting.popleft()
                    slot = min(set(range(self.width)) - {taken for taken, _ in running.values()})
                    running[index] = slot, self._start(requests[index], places[index], slot)
                self._tick()
                for index in list(running):
                    if running[index][1].wait(POLL_SECONDS / len(running)):
                        run = _collected(running.pop(index)[1])
                        self._note(str(places[index].relative_to(self.directory)), run)
                        yield Done(index=index, run=run, repeated=False)
        finally:
            for _, left in running.values():
                left.stop()

    def _place(self, request: Request, label: str, attempt: int) -> Path:
        if label:
            return self.directory / label
        digest = hashlib.sha256(request.model_dump_json().encode()).hexdigest()[:16]
        return self.directory / "probes" / (digest + (f"-{attempt}" if attempt else ""))


def _is_finished(place: Path, request: Request) -> bool:
    try:
        _exit(place)
        return read_file(place / REQUEST).decode("utf-8") == public_text(request.model_dump_json())
    except (OSError, ValueError, TypeError):
        return False


def _exit(place: Path) -> WorkerExit:
    return WorkerExit(**parse_json(read_file(place / EXIT)))


def _reopened(place: Path) -> Run | UsageError | None:
    """What a finished run has left; None where a full disk ended its recording, so that it has to be made again."""
    try:
        run = collect(place, _exit(place))
    except UsageError as error:
        return error
    return run if run.trace.stopped is None else None


def _collected(started: Started) -> Run | UsageError:
    try:
        return started.collect()
    except UsageError as error:
        return error
