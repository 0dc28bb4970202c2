"""What a person sees while a bisection runs: a tree that narrows on a terminal, one line a probe elsewhere."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

from rich.console import Group
from rich.text import Text

from dtypedoctor.cli.region import Region
from dtypedoctor.report.text import counted, duration, number, one_line
from dtypedoctor.trials.bisection.progress import Branch, Progress
from dtypedoctor.trials.bisection.questions import Forest, Measured
from dtypedoctor.trials.bisection.symptoms import part_in_words
from dtypedoctor.trials.reduction import Outcome

__all__ = ["Narrowing"]

_STYLE = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.UNRESOLVED: "yellow"}
_MOST_LINES = 18
_MOST_NAMED = 2


class Narrowing:
    """Shows a bisection's progress on ``stream`` (usually ``sys.stderr``). Use as a context manager."""

    def __init__(self, stream: TextIO) -> None:
        self._region = Region(stream)
        self._stage = ""
        self._began = time.monotonic()
        self._progress: Progress | None = None
        self._last = Text()

    def __enter__(self) -> Self:
        self._region.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._region.__exit__(kind, error, tb)

    def stage(self, words: str) -> None:
        """A new part begins; on a terminal the one before it leaves one line."""
        if not self._region.changes:
            self._region.leave(f"{one_line(words, 500)} …")
        elif self._stage:
            self._region.leave(f"{self._stage:<48} {time.monotonic() - self._began:6.1f} s", cut=True)
        self._stage, self._began, self._last = words, time.monotonic(), Text()

    def forest(self, forest: Forest) -> None:
        """The candidates are known."""
        self._progress = Progress(forest.roots)

    def probe(self, measured: Measured) -> None:
        """A probe has ended."""
        line = _probe_line(measured)
        if measured.question == "modules" and self._progress is not None:
            self._progress.take(measured)
            line += f"  {len(self._progress.suspected)} of {self._progress.leaves} left"
        self._last = Text(line, style=_STYLE[measured.probe.outcome])
        if not self._region.changes:
            self._region.leave(line)

    def tick(self) -> None:
        """Called a few times a second while something runs."""
        if not self._region.changes:
            return
        head = Text(f"{self._stage}  {time.monotonic() - self._began:.1f} s", style="bold")
        tree = self._progress.branches() if self._progress is not None else []
        lines = [head, self._last, *map(_branch_line, tree[:_MOST_LINES])]
        for line in lines:
            line.truncate(self._region.width, overflow="ellipsis")
        self._region.show(Group(*lines))


def _probe_line(measured: Measured) -> str:
    symptom, again = measured.symptom, " (known)" if measured.repeated else ""
    peak = f"peak {number(symptom.absmax)}"
    return f"  {measured.probe.outcome:<10} {_treated(measured.names):<46} {peak:<14} {duration(symptom.seconds):>7}{again}"


def _treated(names: Sequence[str]) -> str:
    if not names:
        return "nothing in float32"
    if names[0] == "":
        return "the whole model"
    shown = ", ".join(one_line(part_in_words(name), 40) for name in names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    return shown + (f" and {more} more" if more > 0 else "")


def _branch_line(branch: Branch) -> Text:
    indent = "  " * (branch.depth + 1)
    if not branch.name:
        return Text(f"{indent}{counted(branch.leaves, 'part')} out of suspicion", style="dim")
    suspected = (
        f"{branch.suspected} of {branch.leaves}" if branch.leaves > 1 else ("suspected" if branch.suspected else "out")
    )
    text = Text(f"{indent}{one_line(branch.name, 60):<44} {suspected:<10}", style="bold" if branch.suspected else "dim")
    if branch.measured is not None:
        symptom = branch.measured.symptom
        outcome = branch.measured.probe.outcome
        text.append(
            f" {outcome:<10} peak {number(symptom.absmax):<9} {duration(symptom.seconds)}", style=_STYLE[outcome]
        )
    return text
