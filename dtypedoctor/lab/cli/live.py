"""What a person sees while something runs: on a terminal one line that changes, elsewhere a line for each run or probe."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dtypedoctor.lab.bisect.questions import Measured
from dtypedoctor.lab.bisect.symptoms import part_in_words
from dtypedoctor.text import counted, duration, number, one_line
from dtypedoctor.trace.reader import Follower

IMPORTS = "imports"
"""The part of a run before its first one, in which torch is imported; it has no directory."""

_LABELS = {
    IMPORTS: "importing torch and the trainers",
    "before": "baseline",
    "unwatched": "uninstrumented",
    "reference": "reference run",
    "float32-twin": "float32 reference",
}
"""What a run is called while it goes on, by the name of its directory."""

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_MOST_NAMED = 2


def label_in_words(label: str) -> str:
    """Return what a person would call a run whose directory is called ``label``."""
    return _LABELS.get(label) or label.replace("remedy-", "fix: ").replace("edit-", "edit on trial, run ").replace(
        "inside-", "parts in float32, run "
    )


class LiveView:
    """Shows progress on ``stream``, usually ``sys.stderr``. Use as a context manager.

    Args:
        stream: where.
        every_run: False leaves no line for the single runs, whose number may be in the hundreds.
    """

    def __init__(self, stream: TextIO, *, every_run: bool = True) -> None:
        self._stream = stream
        self._every_run = every_run
        self._console = Console(file=stream, highlight=False)
        self._live: Live | None = None
        self._depth = 0
        self._running: tuple[str, ...] = ()
        self._label = ""
        self._where = ""
        self._began = time.monotonic()
        self._follower: Follower | None = None

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1 and self._stream.isatty():
            self._live = Live(console=self._console, refresh_per_second=10, transient=True, get_renderable=self._line)
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0 and self._live is not None:
            self._live.__exit__(kind, error, tb)
            self._live = None

    def say(self, line: str, *, cut: bool = False) -> None:
        """Leave a line for good; ``cut`` lets it end where the terminal does."""
        line = one_line(line, 2000) if line.strip() else line
        if self._live is None:
            print(line, file=self._stream, flush=True)
        else:
            self._live.console.print(Text(line[: self._console.width] if cut else line))

    def begin(self, label: str) -> None:
        """A run starts, or another part; ``label`` is the name of its directory, or words."""
        self._label, self._began, self._follower, self._where = label_in_words(label), time.monotonic(), None, ""
        if self._live is None and self._every_run:
            self.say(f"{one_line(self._label, 500)} …")

    def end(self, outcome: str) -> None:
        """The run has ended as ``outcome`` says."""
        if self._every_run:
            self.say(f"{self._label:<36} {time.monotonic() - self._began:5.1f} s  {outcome}", cut=True)

    def scenario(self, *names: str) -> None:
        """These scenarios are running now."""
        self._running = names

    def progress(self, directory: Path) -> None:
        """Called while a run goes on, with where its trace is; of several processes with that of rank 0."""
        if self._live is None:
            return
        if self._follower is None:
            self._follower = Follower(directory)
        where = self._follower.where()
        self._where = f"step {where.step}  {where.phase}  {one_line(where.module)}" if where is not None else "starting"

    def probe(self, measured: Measured) -> None:
        """A probe of a bisection has ended."""
        symptom, again = measured.symptom, " (known)" if measured.repeated else ""
        what, peak = _treated(measured.names), f"peak {number(symptom.absmax)}"
        line = f"  {measured.probe.outcome:<10} {what:<46} {peak:<14} {duration(symptom.seconds):>7}{again}"
        if self._live is None:
            self.say(line)
        self._where = line.strip()

    def _line(self) -> Text:
        """The line as it is now: the terminal asks for it ten times a second."""
        seconds = time.monotonic() - self._began
        scenarios = f"{', '.join(self._running)}: " if self._running else ""
        spinner = f"{_FRAMES[int(seconds * 10) % len(_FRAMES)]} "
        text = Text.assemble(spinner, (scenarios + self._label, "bold"), f"  {seconds:5.1f} s  {self._where}")
        text.truncate(self._console.width, overflow="ellipsis")
        return text


def _treated(names: Sequence[str]) -> str:
    if not names:
        return "no module in float32"
    if names[0] == "":
        return "the whole model"
    shown = ", ".join(one_line(part_in_words(name), 40) for name in names[:_MOST_NAMED])
    return shown + (f" and {counted(len(names) - _MOST_NAMED, 'module')} more" if len(names) > _MOST_NAMED else "")
