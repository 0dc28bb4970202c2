"""Runs requests, several at a time and never one that is done already, and logs what was asked and what came of it."""

import contextlib
import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import append_file, parse_json, read_file, read_head
from dtypedoctor.redaction.redact import public_text
from dtypedoctor.runner.directories import clear
from dtypedoctor.runner.run import EXIT, Run, WorkerExit, collect
from dtypedoctor.scenario.model import REQUEST, Request, Scenario
from dtypedoctor.trace.events import Raised
from dtypedoctor.trials.runs import led_by_origin

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


MOST_APART = 2
"""Processes that build a model of their own beside a server that makes its runs in place."""
PEAKS = 3
"""Times the peak of a plain run that such a process may take: a backward pass has gradients, and parts may be in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Requests that a server cannot serve in place, and the room for their processes beside it.

    Attributes:
        needs: whether a request needs a process of its own.
        room: bytes of the device that are free while the server waits; 0 where requests are not served in place.
    """

    needs: Callable[[Request], bool]
    room: int

    def processes(self, peak: int) -> int:
        """How many of them fit beside the server, where a plain run takes ``peak`` bytes; the server's own references take twice as many."""
        return max(0, min(MOST_APART, (self.room - 2 * peak) // (PEAKS * peak))) if peak > 0 else 0


NONE_APART = Apart(needs=lambda request: False, room=0)


class ProbeRunner:
    """Runs requests in directories below one; what lies there finished is not run again, so that it can go on after any end.

    Args:
        directory: the run directory.
        start: starts a worker.
        width: most workers at a time.
        note: called with each run that was really made, and its directory's name below the run directory.
        apart: which requests can have workers beside these, once :meth:`make_room` has said that there is room.
    """

    def __init__(
        self,
        directory: Path,
        start: Start,
        width: int,
        note: Callable[[str, Run | UsageError], None] = lambda place, run: None,
        apart: Apart = NONE_APART,
    ) -> None:
        self.directory = directory
        self._start = start
        self.width = width
        self._note = note
        self._apart = apart
        self.beside = 0
        """Workers beside those of :attr:`width`, for requests that cannot be served in place."""
        self.runs = 0
        """How many requests were answered, from disk or by a run."""
        self._wanted: deque[tuple[Path, Request]] = deque()
        self._begun: dict[Path, tuple[int, Started]] = {}
        self._reserved = 1
        """Workers that what is only wanted leaves to what is asked for."""

    @property
    def serves_in_place(self) -> bool:
        """Whether a server makes most runs itself, on a GPU: they take little of the host."""
        return self._apart.room > 0

    def run(self, request: Request, label: str = "") -> Run:
        """Runs one request; see :meth:`run_all`.

        Raises:
            UsageError: the scenario cannot be run at all.
        """
        done = next(self.run_all([request], label=label))
        if isinstance(done.run, UsageError):
            raise done.run
        return done.run

    def begin(self, requests: Sequence[Request]) -> None:
        """Runs requests beside those that are asked for, as far as there is room, for somebody who will ask for them later."""
        known = {*self._begun, *(place for place, _ in self._wanted)}
        for request in requests:
            place = self._place(request, "", 0)
            if place not in known and _reopened(place, request) is None:
                self._wanted.append((place, request))
        self._begin_more({})

    @contextlib.contextmanager
    def idle(self) -> Iterator[Callable[[], None]]:
        """Inside, nobody asks for a run: what is wanted may take all workers, and those that have ended again where the yielded function is called."""
        self._reserved = 0
        try:
            self._begin_more({})
            yield partial(self._begin_more, {})
        finally:
            self._reserved = 1

    def make_room(self, peak: int) -> None:
        """Lets requests that cannot be served in place run beside the others, as many as fit where a plain run takes ``peak`` bytes of the device."""
        self.beside = self._apart.processes(peak)

    def _begin_more(self, running: Mapping[int, tuple[int, Started]]) -> None:
        """Begins what is wanted; one worker is left to what is asked for now."""
        for place, request in list(self._wanted):
            free = self._free_slots(request, running)
            reserved = 0 if running or self._is_apart(request) else self._reserved
            if len(free) > reserved:
                self._wanted.remove((place, request))
                self._begun[place] = self._started(request, place, free[0])

    def _started(self, request: Request, place: Path, slot: int) -> tuple[int, Started]:
        clear(place)  # what an interruption has left there
        return slot, self._start(request, place, slot)

    def _is_apart(self, request: Request) -> bool:
        return self.beside > 0 and self._apart.needs(request)

    def _free_slots(self, request: Request, running: Mapping[int, tuple[int, Started]]) -> list[int]:
        """The numbers of the workers that a request can have now: those of the server's own runs come first."""
        taken = {slot for slot, started in self._begun.values() if not started.wait(0.0)}
        taken |= {slot for slot, _ in running.values()}
        first, last = (self.width, self.width + self.beside) if self._is_apart(request) else (0, self.width)
        return [slot for slot in range(first, last) if slot not in taken]

    def leave_begun(self) -> None:
        """Ends what was begun and nobody has asked for."""
        self._wanted.clear()
        while self._begun:
            self._begun.popitem()[1][1].stop()

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
            found = _reopened(place, requests[index]) if place not in self._begun else None
            if found is None:
                waiting.append(index)
            else:
                yield Done(index=index, run=found, repeated=True)
        self._wanted = deque(one for one in self._wanted if one[0] not in places)
        running: dict[int, tuple[int, Started]] = {}
        try:
            for index in [index for index in waiting if places[index] in self._begun]:
                waiting.remove(index)
                running[index] = self._begun.pop(places[index])
            while waiting or running:
                for index in list(waiting):
                    if free := self._free_slots(requests[index], running):
                        waiting.remove(index)
                        running[index] = self._started(requests[index], places[index], free[0])
                self._pass_time(running, waiting)
                for index in list(running):
                    if index in running and running[index][1].wait(POLL_SECONDS / len(running)):
                        run = _collected(running.pop(index)[1])
                        if self.beside and _lacked_memory(run):
                            waiting += [index, *self._end_apart(running)]
                            continue
                        self._note(str(places[index].relative_to(self.directory)), run)
                        yield Done(index=index, run=run, repeated=False)
        finally:
            for _, left in running.values():
                left.stop()

    def _pass_time(self, running: Mapping[int, tuple[int, Started]], waiting: Sequence[int]) -> None:
        if not waiting:
            self._begin_more(running)
        if not running:  # what has begun has all workers
            time.sleep(POLL_SECONDS)

    def _end_apart(self, running: dict[int, tuple[int, Started]]) -> list[int]:
        """Memory is short after all: nothing more runs beside the server, and what does is ended; those of ``running`` that must be run again."""
        self.beside = 0
        again = [index for index, (slot, _) in running.items() if slot >= self.width]
        for index in again:
            running.pop(index)[1].stop()
        for place in [place for place, (slot, _) in self._begun.items() if slot >= self.width]:
            self._begun.pop(place)[1].stop()
        return again

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


def _reopened(place: Path, request: Request) -> Run | UsageError | None:
    """What a finished run of ``request`` has left; None where there is none, or a full disk ended its recording, so that it has to be made again."""
    try:
        run = collect(place, _exit(place)) if _is_finished(place, request) else None
    except UsageError as error:
        return error
    return run if run is not None and all(one.trace.stopped is None for one in run.processes) else None


def _lacked_memory(run: Run | UsageError) -> bool:
    """Whether it ended because a device had no memory for it."""
    raised = run.trace.last(Raised) if isinstance(run, Run) else None
    return raised is not None and raised.type.rpartition(".")[2] == "OutOfMemoryError"


def _collected(started: Started) -> Run | UsageError:
    try:
        return led_by_origin(started.collect())
    except UsageError as error:
        return error


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
