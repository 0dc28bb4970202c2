"""The fixes of a report: what each changes and what came of it, those that fix the failure first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dtypedoctor.report.document import (
    Block,
    Check,
    Heading,
    Items,
    Line,
    Look,
    Paragraph,
    Section,
    Table,
    Words,
    named,
)
from dtypedoctor.report.document import Outcome as Gate
from dtypedoctor.report.model import Outcome, Report, Trial
from dtypedoctor.trials.remedies import remedies
from dtypedoctor.trials.results import Bearing

_WORDS = {Outcome.FIXED: "fixed", Outcome.NOT_FIXED: "not fixed", Outcome.NOT_TRIED: "not tried"}
_BEARINGS = {
    None: "passes, as does the baseline",
    Bearing.NEEDED: "passes",
    Bearing.NOT_NEEDED: "fails the same way",
    Bearing.MOVED: "fails elsewhere",
}
"""The outcomes of an ablation, which is not a fix."""
_MARK = " Unsafe."
_DIAGNOSTIC = " Diagnostic only, not a fix."
_UNSAFE = "Unsafe: it may hide the failure instead of fixing it."
_MOST_NAMED = 2
"""Fixes that a headline names."""
_LOOKS = {
    "fixed": Look.GOOD,
    "raises, as intended": Look.GOOD,
    "passes": Look.GOOD,
    "not fixed": Look.BAD,
    "not tried": Look.WARN,
    "never reached": Look.WARN,
    "passes, as does the baseline": Look.WARN,
    "fails the same way": Look.WARN,
    "fails elsewhere": Look.WARN,
}
_ORDER = (Outcome.FIXED, Outcome.NOT_FIXED, Outcome.NOT_TRIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyLine:
    """One fix in words.

    Attributes:
        id: its id.
        change: what it changes, beginning with a capital letter; empty where that is not known.
        outcome: ``fixed``, ``not fixed``, ``not tried``, ``raises, as intended``, ``never reached``; of an ablation
            ``passes``, ``fails the same way``, ``fails elsewhere``.
        reason: what decided.
        result: how far its run came, beside the baseline (``3/3 steps; 0/3 without it``); empty without a run.
        cures: whether it fixes.
        safe: whether it keeps the meaning of the run.
    """

    id: str
    change: str
    outcome: str
    reason: str
    result: str = ""
    cures: bool = False
    safe: bool = False


def fixes_part(report: Report) -> Section:
    """All fixes, each with what came of it and what it changes, and which to prefer."""
    lines = remedy_lines(report)
    tried = any(trial.outcome is not Outcome.NOT_TRIED for trial in report.trials)
    title = "Fixes tried" if tried else "Suggested fixes"
    if not lines:
        return Section(title, ())
    rows: list[tuple[Line, ...]] = []
    for line in lines:
        outcome = Words(line.outcome, outcome_look(line.outcome))
        rows.append((named(line.id), line.change, (outcome, f": {line.reason}") if line.reason else outcome))
    blocks: list[Block] = [Table(("fix", "what it changes", "outcome"), tuple(rows))]
    if unsafe := legend(lines):
        blocks.append(Paragraph(unsafe, Look.DIM))
    choice = tuple((named(remedy), f" if {when}") for remedy, when in which_one(report))
    if choice:
        blocks += [Heading("which to prefer"), Items(choice)]
    return Section(title, tuple(blocks), "remedies", "Fixes")


def fix_checks(report: Report) -> Iterator[Check]:
    """A check for each fix that was tried: skipped unless it fixes the failure."""
    for trial in report.trials:
        words = f"{outcome_words(trial)}: {trial.reason}"
        fixed = trial.outcome is Outcome.FIXED
        run = trial.run
        yield Check(
            name=f"remedy {trial.remedy}",
            outcome=Gate.PASSED if fixed else Gate.SKIPPED,
            message=words,
            text=words if fixed else "",
            seconds=(run.step_time or 0.0) * run.steps_completed if run else 0.0,
        )


def outcome_look(words: str) -> Look:
    """How an outcome is told apart."""
    return _LOOKS.get(words, Look.PLAIN)


def outcome_words(trial: Trial) -> str:
    """The outcome of a trial as it is written in running text."""
    if trial.diagnostic is not None and trial.outcome is not Outcome.NOT_TRIED:
        return _BEARINGS[trial.diagnostic.bearing]
    if trial.as_intended:
        return "raises, as intended"
    return "never reached" if trial.never_reached else _WORDS[trial.outcome]


def legend(lines: Sequence[RemedyLine]) -> str:
    """What the word *unsafe* means; empty where no fix is."""
    return _UNSAFE if any(line.change.endswith(_MARK) for line in lines) else ""


def cures(report: Report) -> list[RemedyLine]:
    """The fixes that were tried and fix it, in the order in which they were tried."""
    return [line for trial in report.trials if (line := _of_trial(trial, report)).cures]


def which_one(report: Report) -> list[tuple[str, str]]:
    """Where several fixes work and keep the meaning of the run: the id of each, and when to prefer it."""
    known = [remedies()[line.id] for line in cures(report) if line.id in remedies()]
    told = [(remedy.id, remedy.prefer) for remedy in known if remedy.prefer]
    return told if len(told) > 1 else []


def cured_sentence(trials: Sequence[Trial]) -> str:
    """What fixes it, to follow a headline; fixes that may only hide the failure count where nothing else helps."""
    fixed = [trial for trial in trials if _cures(trial)]
    safe = [trial.remedy for trial in fixed if trial.safe]
    if safe:
        more = f" (and {len(safe) - _MOST_NAMED} more)" if len(safe) > _MOST_NAMED else ""
        return f" Fixed by {' or '.join(safe[:_MOST_NAMED])}{more}."
    return f" It disappears with {fixed[0].remedy}, which may only hide it." if fixed else ""


def remedy_lines(report: Report) -> list[RemedyLine]:
    """All fixes: those that work, those that do not, those that were not tried, those that are only proposed."""
    ordered = sorted(report.trials, key=lambda trial: _ORDER.index(trial.outcome))
    return [*(_of_trial(trial, report) for trial in ordered), *_only_proposed(report)]


def _of_trial(trial: Trial, report: Report) -> RemedyLine:
    return RemedyLine(
        id=trial.remedy,
        change=_sentence(trial.summary) + _mark(trial),
        outcome=outcome_words(trial),
        reason=trial.reason,
        result=_result(trial, report),
        cures=_cures(trial),
        safe=trial.safe,
    )


def _cures(trial: Trial) -> bool:
    return trial.outcome is Outcome.FIXED and trial.diagnostic is None


def _mark(trial: Trial) -> str:
    if trial.diagnostic is not None:
        return _DIAGNOSTIC
    return "" if trial.safe else _MARK


def _result(trial: Trial, report: Report) -> str:
    if trial.run is None or not trial.run.steps_planned:
        return ""
    planned, before = trial.run.steps_planned, report.before
    done = f"{trial.run.steps_completed}/{planned} steps"
    if before is None or before.steps_planned != planned:
        return done
    return f"{done}; {before.steps_completed}/{planned} without it"


def _only_proposed(report: Report) -> Iterator[RemedyLine]:
    tried = {trial.remedy for trial in report.trials}
    for name in dict.fromkeys(name for finding in report.findings for name in finding.remedies):
        if name not in tried:
            known = remedies().get(name)
            change = _sentence(known.summary) if known is not None else ""
            yield RemedyLine(id=name, change=change, outcome="not tried", reason="no fix was tried in this run")


def _sentence(text: str) -> str:
    """``text`` with a full stop behind, and a capital letter in front unless it begins with the id of a fix."""
    text = text.strip().rstrip(".")
    first = text.partition(" ")[0]
    return f"{text if '-' in first else text[:1].upper() + text[1:]}." if text else ""
