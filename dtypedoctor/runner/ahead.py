"""The runs of a treatment. What is sure to be asked for is begun beside the run that is waited for, and what is asked for twice is run once."""

import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from dtypedoctor.errors import UsageError
from dtypedoctor.runner.directories import clear
from dtypedoctor.runner.launch import Progress, StartedWorker, run_to_end
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.model import Request, Script

ROOM = 64 << 20
"""Bytes that are free on a disk before anything is begun that nobody waits for yet: the run that is waited for comes first."""


class Made:
    """The runs that have been made.

    A scenario that dtypedoctor runs itself has a seed for all that is random, so the same request is the same run: a fix that is the
    healthy reference, say.

    Args:
        directory: of the treatment; each run lies in it under its label.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._runs: list[tuple[Request, Run]] = []

    def has(self, request: Request) -> bool:
        """Whether there is a run of ``request``."""
        return any(made == request for made, _ in self._runs)

    def note(self, request: Request, run: Run) -> Run:
        """``run``, which is from now on that of ``request``, if it may stand for another one of it."""
        is_one_process = not (run.ranks or run.children or run.others)
        is_script = isinstance(request.scenario.steps[0].workload, Script)
        if is_one_process and not is_script and not run.exit.asked_to_end and not run.died:
            self._runs.append((request, run))
        return run

    def copied(self, request: Request, label: str) -> Run | None:
        """The run of ``request`` under another label, with all that it has left; None where there is none, or no room for a copy."""
        run = next((run for made, run in self._runs if made == request), None)
        place = self._directory / label
        if run is None or place.exists():
            return None
        try:
            shutil.copytree(run.directory, place, symlinks=True)
        except OSError:
            clear(place)
            return None
        return replace(run, directory=place)


class OneByOne:
    """Makes runs when they are asked for.

    Args:
        run: makes one in a directory that does not exist yet.
        directory: of the treatment; each run lies in it under its label.
    """

    def __init__(self, run: Callable[[Request, Path], Run], directory: Path) -> None:
        self._run = run
        self._directory = directory
        self._made = Made(directory)

    def expect(self, requests: Iterable[tuple[str, Request]]) -> None:
        """Nothing is begun."""

    def run(self, request: Request, label: str) -> Run:
        """The run of ``request``.

        Raises:
            UsageError: the directory cannot be written, or the scenario cannot be run at all.
        """
        return self._made.copied(request, label) or self._made.note(
            request, self._run(request, self._directory / label)
        )


class Ahead:
    """Makes runs, and begins those that are expected as soon as there is a worker for them. Use as a context manager.

    At its end what runs is stopped, and what nobody has asked for is removed.

    Args:
        start: starts a worker in a directory that does not exist yet.
        directory: of the treatment; each run lies in it under its label.
        most: workers at a time.
        progress: called now and then with the directory of the run that is waited for.
    """

    def __init__(
        self, start: Callable[[Request, Path], StartedWorker], directory: Path, most: int, progress: Progress
    ) -> None:
        self._start = start
        self._directory = directory
        self._most = most
        self._progress = progress
        self._expected: dict[str, Request] = {}
        self._begun: dict[str, tuple[Request, StartedWorker]] = {}
        self._made = Made(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._expected.clear()
        while self._begun:
            self._forget(next(iter(self._begun)))

    def expect(self, requests: Iterable[tuple[str, Request]]) -> None:
        """These will be asked for, in this order, under these labels; what is known already is not begun again, under another label neither.

        With one worker nothing is begun.
        """
        if self._most == 1:
            return
        for label, request in requests:
            known = [*self._expected.values(), *(begun for begun, _ in self._begun.values())]
            if label not in self._begun and request not in known and not self._made.has(request):
                self._expected.setdefault(label, request)
        self._begin_more()

    def run(self, request: Request, label: str) -> Run:
        """The run of ``request``, which may have been begun, or made under another label.

        Raises:
            UsageError: the directory cannot be written, or the worker says that the scenario cannot be run at all.
        """
        self._expected.pop(label, None)
        if label in self._begun and self._begun[label][0] != request:
            self._forget(label)
        _, started = self._begun.pop(label, (request, None))
        if started is None and (known := self._made.copied(request, label)) is not None:
            return known

        def wait(place: Path) -> None:
            self._progress(place)
            self._begin_more()

        return self._made.note(request, run_to_end(started or self._start(request, self._directory / label), wait))

    def _begin_more(self) -> None:
        """Begins what is expected, as far as there are workers beside the one for the run that is waited for."""
        if self._expected and not self._has_room():
            return
        busy = 1 + sum(not started.wait(0.0) for _, started in self._begun.values())
        while self._expected and busy < self._most:
            label, request = next(iter(self._expected.items()))
            del self._expected[label]
            try:
                self._begun[label] = request, self._start(request, self._directory / label)
            except (UsageError, OSError):  # `run` raises it where this is asked for
                clear(self._directory / label)
            busy += 1

    def _has_room(self) -> bool:
        try:
            return shutil.disk_usage(self._directory).free >= ROOM
        except OSError:  # the directory is gone
            return False

    def _forget(self, label: str) -> None:
        _, started = self._begun.pop(label)
        started.stop()
        clear(self._directory / label)
