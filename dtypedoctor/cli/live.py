"""What a person sees while a worker runs: phase, step, the module under the cursor, and the time."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.text import Text

from dtypedoctor.cli.region import Region
from dtypedoctor.report.text import one_line
from dtypedoctor.trace.reader import Follower


class LiveView:
    """Shows progress on stderr: a line that keeps changing on a terminal, one line a run elsewhere.

    Args:
        stream: usually ``sys.stderr``.
        every_run: False leaves no line for the single runs, whose number may be in the hundreds.
    """

    def __init__(self, stream: TextIO, *, every_run: bool = True) -> None:
        self._every_run = every_run
        self._region = Region(stream)
        self._label = ""
        self._began = time.monotonic()
        self._follower: Follower | None = None

    def __enter__(self) -> Self:
        self._region.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._region.__exit__(kind, error, tb)

    def begin(self, label: str) -> None:
        """A run starts."""
        self._label, self._began, self._follower = label, time.monotonic(), None
        if not self._region.changes and self._every_run:
            self._region.leave(f"{label} …")

    def say(self, line: str) -> None:
        """Leaves a line that is not about a single run."""
        self._region.leave(line)

    def end(self, outcome: str) -> None:
        """The run has ended as ``outcome`` says."""
        if self._every_run:
            seconds = time.monotonic() - self._began
            self._region.leave(f"{self._label:<36} {seconds:5.1f} s  {outcome}", cut=True)

    def progress(self, directory: Path) -> None:
        """Called while the run goes on, with where its trace is; of several processes with that of rank 0."""
        if not self._region.changes:
            return
        if self._follower is None:
            self._follower = Follower(directory)
        where = self._follower.where()
        text = Text.assemble((f"{self._label}", "bold"), f"  {time.monotonic() - self._began:5.1f} s")
        if where is None:
            text.append("  starting")
        else:
            text.append(f"  step {where.step}  {where.phase}  {one_line(where.module)}")
        text.truncate(self._region.width, overflow="ellipsis")
        self._region.show(text)
