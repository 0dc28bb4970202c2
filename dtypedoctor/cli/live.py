"""What a person sees while something runs: one line that changes, or for a bisection a tree that narrows.

Where there is no terminal, a line for each run or probe.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from dtypedoctor.cli.pace import Pace
from dtypedoctor.report.text import counted, duration, number, one_line
from dtypedoctor.trace.reader import Follower
from dtypedoctor.trials.bisection.questions import Forest, Measured
from dtypedoctor.trials.bisection.symptoms import part_in_words
from dtypedoctor.trials.reduction import Outcome
from dtypedoctor.trials.search import Node, leaves_of
from dtypedoctor.values import dataclass

IMPORTS = "imports"
"""The part of a run before its first one, in which torch is imported; it has no directory."""

LOADING = "loading"
"""The part in which a model is loaded that stays loaded for all runs; its directory is called otherwise."""

_LABELS = {
    LOADING: "loading the model",
    IMPORTS: "importing torch and the trainers",
    "before": "baseline",
    "closer": "op trace",
    "rerun": "op trace",
    "closer-eager": "op trace, without the compiler",
    "unwatched": "uninstrumented",
    "reference": "reference run",
    "float32-twin": "float32 reference",
}
"""What a run is called while it goes on, by the name of its directory."""


def label_in_words(label: str) -> str:
    """A run as a person would call it; ``label`` is the name of its directory."""
    return _LABELS.get(label) or label.replace("remedy-", "fix: ").replace("closer-", "op trace ").replace(
        "inside-", "parts in float32, run "
    )


class Region:
    """Shows what changes at the foot of a terminal; elsewhere only the lines that stay. Use as a context manager.

    Args:
        stream: usually ``sys.stderr``.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream, highlight=False)
        self._live: Live | None = None
        self._depth = 0

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1 and self._stream.isatty():
            self._live = Live(console=self._console, refresh_per_second=10, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0 and self._live is not None:
            self._live.__exit__(kind, error, tb)
            self._live = None

    @property
    def changes(self) -> bool:
        """Whether there is a terminal to change, and it is entered."""
        return self._live is not None

    @property
    def width(self) -> int:
        """Columns."""
        return self._console.width

    def show(self, content: RenderableType) -> None:
        """Shows ``content`` in the place of what was shown before."""
        if self._live is not None:
            self._live.update(content)

    def say(self, line: str, *, cut: bool = False) -> None:
        """Leaves a line for good, e.g. one that is not about a single run; ``cut`` lets it end where the terminal does."""
        line = one_line(line, 2000) if line.strip() else line
        if self._live is None:
            print(line, file=self._stream, flush=True)
        else:
            self._live.console.print(Text(line[: self.width] if cut else line))


class Counted:
    """How many of several scenarios are finished, and how long the rest may take.

    Args:
        expected: the seconds of each in the last run of the same kind; None where there is none.
    """

    def __init__(self, expected: Mapping[str, float | None]) -> None:
        self._expected = dict(expected)
        self._took: dict[str, float] = {}
        self._begun: dict[str, float] = {}
        self._began = time.monotonic()
        self.total = len(self._expected)

    @property
    def done(self) -> int:
        """How many are finished."""
        return len(self._took)

    def begin(self, name: str) -> None:
        """A scenario begins; the second time nothing changes."""
        self._begun.setdefault(name, time.monotonic())

    def note(self, name: str, seconds: float) -> None:
        """A scenario is finished."""
        self._took[name] = seconds
        self._begun.pop(name, None)

    def left(self) -> float | None:
        """Seconds that the rest may take: what it took earlier, else as long on average as what is known."""
        known = [*self._took.values(), *(one for one in self._expected.values() if one is not None)]
        if not known:
            return None
        mean = sum(known) / len(known)
        rest = {name: one or mean for name, one in self._expected.items() if name not in self._took}
        now = time.monotonic()
        gone = sum(min(now - begun, rest[name]) for name, begun in self._begun.items())
        return max(0.0, sum(rest.values()) - gone) / max(1, len(self._begun))

    def plan(self) -> str:
        """As in ``Plan: 26 of 29 scenarios, about 5 min``."""
        left = self.left()
        some = f"{self.total - self.done} of " if self.done else ""
        return f"Plan: {some}{counted(self.total, 'scenario')}" + (f", about {_roughly(left)}" if left else "")

    def words(self) -> str:
        """As in ``3 of 29 scenarios, 40 s so far, about 5 min left``."""
        left = self.left() if self.done < self.total else None
        rest = f", about {_roughly(left)} left" if left else ""
        return (
            f"{self.done} of {counted(self.total, 'scenario')}, {_roughly(time.monotonic() - self._began)} so far{rest}"
        )


class LiveView(Region):
    """Shows progress on stderr: a line that keeps changing on a terminal, one line a run elsewhere.

    Args:
        stream: usually ``sys.stderr``.
        every_run: False leaves no line for the single runs, whose number may be in the hundreds.
        scenarios: those that run are some of these.
    """

    def __init__(self, stream: TextIO, *, every_run: bool = True, scenarios: Counted | None = None) -> None:
        self._every_run = every_run
        self._scenarios = scenarios
        self._running: tuple[str, ...] = ()
        super().__init__(stream)
        self._label = ""
        self._began = time.monotonic()
        self._follower: Follower | None = None
        self._where = ""
        self._pace: Pace | None = None

    def keep_pace(self, pace: Pace) -> None:
        """From here on ``pace`` is told of each run, and its estimate is shown."""
        self._pace = pace
        if pace.total is not None and self._every_run:
            self.say(f"The last run took {_roughly(pace.total)}.")

    def begin(self, label: str) -> None:
        """A run starts, or another part."""
        self._label, self._began, self._follower, self._where = label_in_words(label), time.monotonic(), None, ""
        if self._pace is not None:
            self._pace.begin(label)
        if not self.changes and self._every_run:
            self.say(f"{self._label} …")
        self.show(self)

    def scenario(self, *names: str) -> None:
        """These scenarios are running now."""
        if self._scenarios is not None:
            for name in names:
                self._scenarios.begin(name)
        self._running = names
        self.show(self)

    def end(self, outcome: str) -> None:
        """The run has ended as ``outcome`` says."""
        if self._pace is not None:
            self._pace.end()
        if self._every_run:
            seconds = time.monotonic() - self._began
            self.say(f"{self._label:<36} {seconds:5.1f} s  {outcome}", cut=True)

    def progress(self, directory: Path) -> None:
        """Called while the run goes on, with where its trace is; of several processes with that of rank 0."""
        if not self.changes:
            return
        if self._follower is None:
            self._follower = Follower(directory)
        where = self._follower.where()
        self._where = f"step {where.step}  {where.phase}  {one_line(where.module)}" if where is not None else "starting"

    def __rich__(self) -> Text:
        """The line as it is now: the terminal asks for it ten times a second, also while nothing calls :meth:`progress`."""
        seconds = time.monotonic() - self._began
        if self._scenarios is None:
            text = Text.assemble(_spinner(seconds), (self._label, "bold"), f"  {seconds:5.1f} s  {self._where}")
            text.append(_left(self._pace), style="dim")
        else:
            what = ", ".join(self._running) + (f": {self._label}" if self._label else "")
            text = Text.assemble(_spinner(seconds), (self._scenarios.words(), "bold"), f"  {what}  {self._where}")
        text.truncate(self.width, overflow="ellipsis")
        return text


_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def _spinner(seconds: float) -> str:
    return f"{_FRAMES[int(seconds * 10) % len(_FRAMES)]} "


def _left(pace: Pace | None) -> str:
    """How long the whole run has taken and may still take; empty where nobody keeps count."""
    if pace is None:
        return ""
    left = pace.left()
    return f"  {_roughly(pace.elapsed)} so far" + (f", about {_roughly(left)} left" if left is not None else "")


def _roughly(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One line of the tree.

    Attributes:
        depth: 0 for the roots.
        name: the candidate; empty where several that are ruled out share a line.
        suspected: how many of its leaves may still be culprits.
        leaves: how many it has, or how many share this line.
        measured: the last probe that treated just this candidate.
    """

    depth: int
    name: str
    suspected: int
    leaves: int
    measured: Measured | None = None


class SuspectTree:
    """Follows the probes of one question.

    A leaf is ruled out when a run was healthy without treating it. Where treating more can hurt that is not the last
    word, so this is for the eye; the reducer decides.

    Args:
        roots: the candidates.
    """

    def __init__(self, roots: Sequence[Node]) -> None:
        self._roots = tuple(roots)
        self.leaves = len(leaves_of(self._roots))
        self.suspected = leaves_of(self._roots)
        """The leaves that may still be culprits."""
        self._measured: dict[str, Measured] = {}

    def take(self, measured: Measured) -> None:
        """A probe has ended."""
        treated = measured.probe.treated
        if measured.probe.outcome is Outcome.PASS and len(treated) < len(self.suspected):
            self.suspected = treated
        if len(measured.names) == 1:
            self._measured[measured.names[0]] = measured

    def branches(self) -> list[Branch]:
        """The tree, opened where a part of a candidate is ruled out, parents before children."""
        return list(self._level(self._roots, 0))

    def _level(self, nodes: Sequence[Node], depth: int) -> Iterator[Branch]:
        cleared = 0
        for node in nodes:
            leaves = leaves_of([node])
            suspected = len(leaves & self.suspected)
            measured = self._measured.get(node.id)
            if not suspected and measured is None:
                cleared += len(leaves)
                continue
            yield Branch(depth=depth, name=node.id, suspected=suspected, leaves=len(leaves), measured=measured)
            if 0 < suspected < len(leaves):
                yield from self._level(node.children, depth + 1)
        if cleared:
            yield Branch(depth=depth, name="", suspected=0, leaves=cleared)


_STYLE = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.UNRESOLVED: "yellow"}
_MOST_LINES = 18
_MOST_NAMED = 2


class Narrowing(Region):
    """Shows a bisection's progress on ``stream`` (usually ``sys.stderr``). Use as a context manager."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._stage = ""
        self._began = time.monotonic()
        self._progress: SuspectTree | None = None
        self._last = Text()
        self._pace: Pace | None = None

    def keep_pace(self, pace: Pace) -> None:
        """From here on ``pace`` is told of each part, and its estimate is shown."""
        self._pace = pace
        if pace.total is not None:
            self.say(f"The last bisection took {_roughly(pace.total)}.")

    def stage(self, words: str) -> None:
        """A new part begins; on a terminal the one before it leaves one line."""
        if self._pace is not None:
            self._pace.begin(words)
        if not self.changes:
            self.say(f"{one_line(words, 500)} …")
        elif self._stage:
            self.say(f"{self._stage:<48} {time.monotonic() - self._began:6.1f} s", cut=True)
        self._stage, self._began, self._last = words, time.monotonic(), Text()
        self.show(self)

    def forest(self, forest: Forest) -> None:
        """The candidates are known."""
        self._progress = SuspectTree(forest.roots)

    def probe(self, measured: Measured) -> None:
        """A probe has ended."""
        line = _probe_line(measured)
        if measured.question == "modules" and self._progress is not None:
            self._progress.take(measured)
            line += f"  {len(self._progress.suspected)} of {self._progress.leaves} left"
        self._last = Text(line, style=_STYLE[measured.probe.outcome])
        if not self.changes:
            self.say(line)

    def __rich__(self) -> Group:
        """The tree as it is now: the terminal asks for it ten times a second."""
        seconds = time.monotonic() - self._began
        head = Text.assemble(_spinner(seconds), (f"{self._stage}  {seconds:.1f} s", "bold"), (_left(self._pace), "dim"))
        tree = self._progress.branches() if self._progress is not None else []
        lines = [head, self._last.copy(), *map(_branch_line, tree[:_MOST_LINES])]
        for line in lines:
            line.truncate(self.width, overflow="ellipsis")
        return Group(*lines)


def _probe_line(measured: Measured) -> str:
    symptom, again = measured.symptom, " (known)" if measured.repeated else ""
    peak = f"peak {number(symptom.absmax)}"
    return f"  {measured.probe.outcome:<10} {_treated(measured.names):<46} {peak:<14} {duration(symptom.seconds):>7}{again}"


def _treated(names: Sequence[str]) -> str:
    if not names:
        return "no module in float32"
    if names[0] == "":
        return "the whole model"
    shown = ", ".join(one_line(part_in_words(name), 40) for name in names[:_MOST_NAMED])
    more = len(names) - _MOST_NAMED
    return shown + (f" and {more} more" if more > 0 else "")


def _branch_line(branch: Branch) -> Text:
    indent = "  " * (branch.depth + 1)
    if not branch.name:
        return Text(f"{indent}{counted(branch.leaves, 'module')} ruled out", style="dim")
    suspected = (
        f"{branch.suspected} of {branch.leaves}"
        if branch.leaves > 1
        else ("suspected" if branch.suspected else "ruled out")
    )
    text = Text(f"{indent}{one_line(branch.name, 60):<44} {suspected:<10}", style="bold" if branch.suspected else "dim")
    if branch.measured is not None:
        symptom = branch.measured.symptom
        outcome = branch.measured.probe.outcome
        text.append(
            f" {outcome:<10} peak {number(symptom.absmax):<9} {duration(symptom.seconds)}", style=_STYLE[outcome]
        )
    return text
