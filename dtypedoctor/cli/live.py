"""What a person sees while a worker runs: phase, step, the module under the cursor, and the time."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dtypedoctor.trace.follow import Follower


class LiveView:
    """Shows progress on stderr: a line that keeps changing on a terminal, one line a run elsewhere.

    Args:
        stream: usually ``sys.stderr``.
        every_run: False leaves no line for the single runs, whose number may be in the hundreds.
    """

    def __init__(self, stream: TextIO, *, every_run: bool = True) -> None:
        self._every_run = every_run
        self._console = Console(file=stream, highlight=False)
        self._stream = stream
        self._live: Live | None = None
        self._label = ""
        self._began = time.monotonic()
        self._follower: Follower | None = None

    def __enter__(self) -> Self:
        if self._stream.isatty():
            self._live = Live(console=self._console, refresh_per_second=10, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, tb)

    def begin(self, label: str, directory: Path) -> None:
        """A run starts."""
        self._label, self._began, self._follower = label, time.monotonic(), Follower(directory)
        if self._live is None and self._every_run:
            print(f"{label} …", file=self._stream, flush=True)

    def say(self, line: str) -> None:
        """Leaves a line that is not about a single run."""
        if self._live is None:
            print(line, file=self._stream, flush=True)
        else:
            self._live.console.print(Text(line))

    def end(self, outcome: str) -> None:
        """The run has ended as ``outcome`` says."""
        if not self._every_run:
            return
        seconds = time.monotonic() - self._began
        line = f"{self._label:<36} {seconds:5.1f} s  {outcome}"
        if self._live is None:
            print(line, file=self._stream, flush=True)
        else:
            self._live.console.print(Text(line[: self._console.width]))

    def progress(self, directory: Path) -> None:
        """Called while the run goes on."""
        if self._live is None or self._follower is None:
            return
        where = self._follower.where()
        text = Text.assemble((f"{self._label}", "bold"), f"  {time.monotonic() - self._began:5.1f} s")
        if where is None:
            text.append("  starting")
        else:
            text.append(f"  step {where.step}  {where.phase}  {where.module}")
        text.truncate(self._console.width, overflow="ellipsis")
        self._live.update(text)
