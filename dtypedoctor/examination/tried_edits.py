"""Tries the edits of findings: an edit is shown as a change of the source only after the changed program has shown that it helps.

The program is run again with its edited files in place of its own, alone (:mod:`dtypedoctor.runner.view`), for no longer than the failure takes to show. Where
that cannot be, what has changed the failing call or operator as the edit would is its trial. An edit that was not tried, or does not help, is told in words.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dtypedoctor.analysis import analysis_of, ending_of
from dtypedoctor.diagnosis.edits import ON_THE_OPERATOR, TRIED_AS
from dtypedoctor.diagnosis.registry import spec_of
from dtypedoctor.diagnosis.rule import SILENT, Advice, Edit, Finding, Severity
from dtypedoctor.examination.results import Outcome, Trial
from dtypedoctor.foreign_files import read_file
from dtypedoctor.replay.capsule import CallFix, Capsule, NoCapsule
from dtypedoctor.runner.run import Run
from dtypedoctor.text import counted
from dtypedoctor.trace.events import Metric
from dtypedoctor.trace.model import Trace

MOST_TRIALS = 4
"""Runs with an edit, at most."""
SECONDS = 60.0
"""Time for all runs with edits together; twice as long as the first run, and a little more, is enough for most."""
CHEAP = 30.0
"""Longest first run, in seconds, after which the program is run again for an edit without having been asked for."""
SECONDS_FOR_NOTE = 5.0
"""Longest run of a healthy program that is repeated for the edit of a note."""
_LARGEST_FILE = 4 << 20
_ROUNDING = 2**-4
"""How far a loss may be from that of the program as it is where that is right: half precision keeps 8 bits or more, and a deep network loses some."""
_ABSURD = 1000.0
"""How many times larger than the losses before it a loss is that is finite and wrong: a bound in the place of an inf."""
_AFTER_THE_LOSS = frozenset({"backward", "optimizer"})

Attempt = Callable[[str, dict[str, str], int], Run | str]
"""Runs the program with other text in some of its files, under a label, for so many seconds; gives the run, or why there is none."""


@dataclass(slots=True)
class EditTrials:
    """What shows whether an edit helps.

    Attributes:
        before: the run of the program as it is.
        capsule: the failing call, on which fixes were tried.
        trials: runs that were made with a fix.
        attempt: None where the program cannot be run again.
        made: edited runs so far.
        spent: seconds that they have taken.
        shown: what the last of them has shown, as a sentence.
    """

    before: Run
    capsule: Capsule | NoCapsule | None = None
    trials: Sequence[Trial] = ()
    attempt: Attempt | None = None
    made: int = 0
    spent: float = 0.0
    shown: str = ""

    def judged(self, finding: Finding, advice: Advice) -> Advice:
        """The advice: its edits with how they were tried, or without edits, in words, with the reason."""
        if not advice.edits:
            return advice
        if finding.severity is Severity.INFO and self.before.exit.seconds > SECONDS_FOR_NOTE:
            return replace(advice, edits=())
        how, verdict = self._run(finding, advice.edits)
        if how is None:
            called, why_not = self._call(finding, advice.maker)
            how, verdict = (called, why_not) if called is not None else (None, verdict)
        places = ", ".join(dict.fromkeys(f"{edit.file}:{edit.line}" for edit in advice.edits[:3]))
        if how is None:
            return replace(advice, text=f"{advice.text} Where: {places}; not tried: {verdict}.", edits=())
        if verdict:
            text = f"{advice.text} It was tried {_WHERE[how]} ({places}) and does not help: {verdict}."
            return replace(advice, text=text, edits=(), tried=how)
        return replace(advice, text=f"{advice.text}{self.shown}" if how == "run" else advice.text, tried=how)

    def _run(self, finding: Finding, edits: Sequence[Edit]) -> tuple[str | None, str]:
        """``run`` and what speaks against the edit, empty where nothing does; or None, and why the edited program was not run."""
        if self.attempt is None:
            return None, "the program is not run again from here"
        if self.before.exit.seconds > CHEAP:
            return None, f"a run of the program takes {self.before.exit.seconds:.0f} s"
        if self.made >= MOST_TRIALS or self.spent >= SECONDS:
            return None, f"{self.made} others were tried before it"
        try:
            files = edited_files(edits)
        except (OSError, ValueError):
            return None, "the file is not there as it was"
        self.made += 1
        seconds = math.ceil(min(SECONDS - self.spent, 2 * self.before.exit.seconds + 20))
        run = self.attempt(f"edit-{self.made}", files, seconds)
        if isinstance(run, str):
            return None, run
        self.spent += run.exit.seconds
        if run.exit.asked_to_end:
            self.attempt = None
            return None, "its run was interrupted"
        steps = counted(run.trace.steps_done, "step")
        self.shown = f" Tried: {steps if run.trace.steps_done else 'the program runs'} without the failure."
        if run.exit.timed_out and run.trace.steps_done <= max(finding.step or 0, self.before.trace.steps_done):
            return None, f"in {seconds} s the program does not come to where it fails"
        for process in run.processes:
            for objection in _objections(finding, self.before, process):
                return "run", objection
        changed = _changed_loss(finding, self.before, run)
        return "run", changed if changed and self._repeats(finding, files, seconds) else ""

    def _repeats(self, finding: Finding, files: Mapping[str, str], seconds: int) -> bool:
        """Whether another run of the program as it is has the same first loss: where nothing seeds its random numbers, an edit does not change it."""
        assert self.attempt is not None
        run = self.attempt(
            f"as-it-is-{self.made}", {path: read_file(Path(path), _LARGEST_FILE).decode() for path in files}, seconds
        )
        return isinstance(run, str) or not _changed_loss(finding, self.before, run)

    def _call(self, finding: Finding, maker: str) -> tuple[str | None, str]:
        """How what the edit does was tried without it (None: not at all), and why it does not help."""
        fix = TRIED_AS.get(maker)
        for trial in self.trials:
            if trial.remedy == fix and trial.outcome is not Outcome.NOT_TRIED:
                return "run", _why_not(trial)
        on_the_call = self.capsule.fixes if isinstance(self.capsule, Capsule) else ()
        for row in on_the_call:
            # What raises has met a dtype that stands in the module's own code, where the edit would change it
            if row.fix == fix and row.outcome != Outcome.NOT_TRIED and not row.reason.startswith("raises "):
                return "call", _why_not(row)

        # The operator alone was made again with what the edit does: that is what proves the finding
        if maker in ON_THE_OPERATOR and finding.proven_by is not None:
            return "call", ""
        return None, ""


def _why_not(tried: Trial | CallFix) -> str:
    """Why a fix that was tried does not help; empty where it does."""
    return "" if tried.outcome == Outcome.FIXED else tried.reason


_WHERE = {"call": "on the failing call", "run": "in a run"}


def judge_edits(findings: Sequence[Finding], advice: Sequence[Advice], trials: EditTrials) -> tuple[Advice, ...]:
    """The advice on each finding, with edits only where they were tried and help: of several ways the first that does.

    After the first edit that helps, the others wait: what is left to mend shows when the program runs with it.
    """
    judged: list[Advice] = []
    for finding, first in zip(findings, advice, strict=True):
        ways: list[Advice] = []
        for way in (first, *first.others):
            ways.append(trials.judged(finding, replace(way, others=())))
            if ways[-1].edits:
                trials = replace(trials, attempt=None)
                break
        trials = replace(trials, capsule=None)  # the call of the capsule fails as the first finding says
        judged.append(ways[-1] if ways[-1].edits else ways[0])
    return tuple(judged)


def edited_files(edits: Sequence[Edit]) -> dict[str, str]:
    """The files that edits change, by path, as they are after them.

    Raises:
        OSError: one cannot be read.
        ValueError: one has other lines than the edits say.
    """
    files: dict[str, list[str]] = {}
    for edit in edits:
        path = str(Path(edit.file).resolve())
        if path not in files:
            files[path] = [line.decode() for line in read_file(Path(path), _LARGEST_FILE).splitlines()]
        if files[path][edit.line - 1 : edit.line] != [edit.old]:
            raise ValueError(f"{edit.file}:{edit.line} has changed")
    gone = {(str(Path(edit.file).resolve()), edit.line) for edit in edits if not edit.new}
    for edit in edits:
        files[str(Path(edit.file).resolve())][edit.line - 1] = edit.new
    return {
        path: "".join(f"{line}\n" for number, line in enumerate(lines, 1) if (path, number) not in gone)
        for path, lines in files.items()
    }


def _objections(finding: Finding, before: Run, run: Run) -> Iterator[str]:
    """What speaks against an edit after the run with it, the plainest first."""
    ending, analysis = ending_of(run), analysis_of(run.trace)
    if ending.raised is not None or (run.died and not run.exit.timed_out):
        yield ending.words

    known = {one.id for one in analysis_of(before.trace).findings}
    for left in analysis.findings:
        is_milder = left.severity is Severity.INFO and finding.severity is not Severity.INFO
        if left.id == finding.id and not is_milder:
            yield f"{left.id} recurs"
        elif left.severity is Severity.ERROR and left.id not in known:
            yield f"{left.id} occurs"

    # An edit that was to make values finite must not make others of those that were
    if not spec_of(finding.id).nonfinite:
        return
    was, losses = _losses(before.trace), _losses(run.trace)
    if not all(map(math.isfinite, losses.values())):
        yield "the loss is not finite"
    usual = max((abs(loss) for loss in was.values() if math.isfinite(loss)), default=math.inf)
    worst = max(map(abs, losses.values()), default=0.0)
    # What float16 cannot hold may be that large. What float32 could not hold is bounded now.
    if finding.dtype != "float16" and worst > _ABSURD * max(usual, 1.0):
        yield f"the loss is {worst:.3g} then"


def _changed_loss(finding: Finding, before: Run, run: Run) -> str:
    """How the first loss differs, as a clause: computed with the weights that the program begins with, it is the same in both runs where it was right."""
    was, losses = _losses(before.trace), _losses(run.trace)
    begin = min(was.keys() & losses.keys(), default=0)
    is_right = begin and begin < (finding.step or 1) + (finding.phase in _AFTER_THE_LOSS) and math.isfinite(was[begin])
    if not is_right or spec_of(finding.id).family is SILENT:
        return ""
    usual = max(abs(loss) for loss in was.values() if math.isfinite(loss))
    rounding = _ROUNDING * max(abs(losses[begin]), abs(was[begin])) + _ROUNDING**4 * usual
    if abs(losses[begin] - was[begin]) <= rounding:
        return ""
    return f"it changes the loss of step {begin}, which is right, from {was[begin]:.4g} to {losses[begin]:.4g}"


def _losses(trace: Trace) -> dict[int, float]:
    """The losses by step, also those that are not finite."""
    return {
        metric.step: float(metric.values.get("loss", metric.spelled.get("loss", "nan")))
        for metric in trace.all(Metric)
        if "loss" in metric.values or "loss" in metric.nonfinite
    }
