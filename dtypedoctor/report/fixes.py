"""Fixes in words: what each changes, what came of it on the run and on the failing call, and which to prefer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtypedoctor.diagnosis.wording import short
from dtypedoctor.examination.fixes import remedies, remedy_named
from dtypedoctor.examination.results import Bearing
from dtypedoctor.plugins import KEEP_FLOAT32, Correction, registered
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
    anchored,
    named,
)
from dtypedoctor.report.document import Outcome as Gate
from dtypedoctor.report.model import Outcome, Report, RunSummary, Trial
from dtypedoctor.text import counted

_WORDS = {Outcome.FIXED: "fixed", Outcome.NOT_FIXED: "not fixed", Outcome.NOT_TRIED: "not tried"}
_WORDS_HERE = {outcome.value: words for outcome, words in _WORDS.items()} | {"fixed": "fixed on this call"}
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
_FIXED_HERE = "Fixed on this call: it alone was made again. Whether it fixes the whole script: `dtypedoctor exec --try FIX SCRIPT`, or the edit in the script."
_MOST_NAMED = 2
"""Fixes that a headline names."""
_LOOKS = {
    **dict.fromkeys(("fixed", "fixed on this call", "raises, as intended"), Look.GOOD),
    **dict.fromkeys(("not tried", "never reached", *_BEARINGS.values()), Look.WARN),
    "passes": Look.GOOD,
    "not fixed": Look.BAD,
}
_ORDER = (Outcome.FIXED, Outcome.NOT_FIXED, Outcome.NOT_TRIED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyLine:
    """One fix in words.

    Attributes:
        id: its id.
        change: what it changes, beginning with a capital letter; empty where that is not known.
        outcome: ``fixed``, ``fixed on this call`` (of a capsule), ``not fixed``, ``not tried``, ``raises, as intended``, ``never reached``; of an ablation
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
    on_the_call = _on_the_call(report)
    passing = {str(fix["fix"]) for fix in call_fixes(report) if fix["outcome"] != Outcome.NOT_TRIED.value}
    lines = [line for line in remedy_lines(report) if line.outcome != "not tried" or line.id not in passing]
    tried = any(trial.outcome is not Outcome.NOT_TRIED for trial in report.trials)
    blocks = list(_table(lines, "fix"))
    if any(line.change.endswith(_MARK) for line in lines):
        blocks.append(Paragraph(_UNSAFE, Look.DIM))
    if inside := _inside(report):
        blocks.append(Paragraph(inside))
    if report.replay is not None and cures(report):
        blocks.append(Paragraph(_FIXED_HERE, Look.DIM))
    if on_the_call:
        blocks += [Heading("on the failing call alone"), *_table(on_the_call, "fix-on-the-call")]
        blocks += [Paragraph(_FIXED_HERE, Look.DIM)] if any(line.cures for line in on_the_call) else []
    elif blocks and not tried and report.capsule and "directory" in report.capsule:
        blocks.append(Paragraph(f"Try them on the failing call, without running the script: {replay_command(report)}"))
    if choice := which_one(report):
        blocks += [Heading("which to prefer"), Items(tuple((named(fix), f" if {when}") for fix, when in choice))]
    return Section("Fixes tried" if tried or on_the_call else "Suggested fixes", tuple(blocks), "remedies", "Fixes")


def _table(lines: Sequence[RemedyLine], anchor: str) -> Iterator[Block]:
    """Lay out fixes, each under an anchor of its own."""
    rows: list[tuple[Line, ...]] = []
    for line in lines:
        outcome = Words(line.outcome, outcome_look(line.outcome))
        name = (named(line.id), anchored(f"{anchor}-{line.id}"))
        rows.append((name, line.change, (outcome, f": {line.reason}") if line.reason else outcome))
    if rows:
        yield Table(("fix", "what it changes", "outcome"), tuple(rows))


def _inside(report: Report) -> str:
    """What a bisection inside the module of a capsule has found, as a sentence; empty where there was none."""
    found = (report.replay or {}).get("inside")
    if not found:
        return ""
    cost = f"{counted(found['runs'], 'run')}, {counted(found['candidates'], 'part')}"
    if not found["parts"]:
        return f"Float32 inside the module does not fix it: {found['why']} ({cost})."
    own = "'s own operators"  # as keep-float32 names them: MODULE::self
    words = " and ".join(
        short(part.removesuffix("::self")) + (own if part.endswith("::self") else "") for part in found["parts"]
    )
    minimal = "no smaller set passes" if found["one_minimal"] else found["why"] or "a smaller set may pass"
    return f"Smallest set of parts that must run in float32: {words} ({minimal}; {cost})."


def _on_the_call(report: Report) -> list[RemedyLine]:
    """Say what became of the fixes that were tried on the failing call when it was kept, each as `exec --try` takes it for the whole script."""
    capsule = report.capsule or {}
    lines = []
    for fix in call_fixes(report):
        name, outcome = str(fix["fix"]), str(fix["outcome"])
        if name == KEEP_FLOAT32 and capsule.get("module"):
            name = f"{name}:{capsule['module']}"
        known = registered(Correction).get(name) or remedy_named(name, lambda _: str(capsule.get("class") or ""))
        summary = known.summary if known is not None else ""
        lines.append(
            RemedyLine(
                id=name,
                change=summary[:1].upper() + summary[1:],
                outcome=_WORDS_HERE.get(outcome, outcome),
                reason=str(fix["reason"]),
                cures=outcome == Outcome.FIXED,
            )
        )
    return lines


def call_fixes(report: Report) -> Sequence[Mapping[str, Any]]:
    """The fixes that were tried on the failing call when it was kept."""
    return (report.capsule or {}).get("fixes") or ()


def replay_command(report: Report, directory: str = "RUN") -> str:
    """What makes the failing call again that was kept in the run's ``directory``."""
    kept = report.capsule or {}
    option = " --allow-code" if kept.get("allow_code") else ""
    return f"dtypedoctor replay {directory}/{kept['directory']}{option}"


def fix_checks(report: Report) -> Iterator[Check]:
    """A check for each fix that was tried: skipped unless it fixes the failure."""
    for trial in report.trials:
        words = f"{outcome_words(trial, here=report.replay is not None)}: {trial.reason}"
        fixed = trial.outcome is Outcome.FIXED
        run = trial.run
        yield Check(
            name=f"remedy {trial.remedy}",
            outcome=Gate.PASSED if fixed else Gate.SKIPPED,
            message=words,
            text=words if fixed else "",
            seconds=seconds_of(run),
        )


def seconds_of(run: RunSummary | None) -> float:
    """How long a run took, for a test report: an older report says only how long its steps did, and none may have been completed."""
    if run is None:
        return 0.0
    return run.seconds if run.seconds is not None else (run.step_time or 0.0) * run.steps_completed


def outcome_look(words: str) -> Look:
    """How an outcome is told apart."""
    return _LOOKS.get(words, Look.PLAIN)


def outcome_words(trial: Trial, *, here: bool = False) -> str:
    """The outcome of a trial as it is written in running text.

    Args:
        trial: of a fix or an ablation.
        here: it was tried on the call of a capsule: what works is *fixed on this call*.
    """
    if here and _is_fix(trial):
        return "fixed on this call"
    if trial.diagnostic is not None and trial.outcome is not Outcome.NOT_TRIED:
        return _BEARINGS[trial.diagnostic.bearing]
    if trial.outcome is Outcome.FIXED and trial.remains:
        return "does not recur, others do"
    if trial.as_intended:
        return "raises, as intended"
    return "never reached" if trial.never_reached else _WORDS[trial.outcome]


def cures(report: Report) -> list[RemedyLine]:
    """The fixes that were tried and fix it, in the order in which they were tried."""
    return [line for trial in report.trials if (line := _of_trial(trial, report)).cures]


def which_one(report: Report) -> list[tuple[str, str]]:
    """Where several fixes work and keep the meaning of the run: the id of each, and when to prefer it."""
    known = [remedies()[line.id] for line in cures(report) if line.id in remedies()]
    told = [(remedy.id, remedy.prefer) for remedy in known if remedy.prefer]
    return told if len(told) > 1 else []


def cured_sentence(trials: Sequence[Trial], *, here: bool = False) -> str:
    """What fixes it, to follow a headline; fixes that may only hide the failure count where nothing else helps.

    Args:
        trials: what was tried.
        here: on the call of a capsule.
    """
    fixed = [trial for trial in trials if _is_fix(trial)]
    safe = [trial.remedy for trial in fixed if trial.safe]
    if safe:
        more = len(safe) - _MOST_NAMED
        names = " or ".join(safe[:_MOST_NAMED]) + (f" (and {more} more)" if more > 0 else "")
        return f" On this call, fixed by {names}." if here else f" Fixed by {names}."
    if fixed:
        return f" It disappears with {fixed[0].remedy}, which may only hide it."
    for trial in trials:
        if trial.outcome is Outcome.FIXED and trial.remains:
            return f" It does not recur with {trial.remedy}, but {', '.join(trial.remains)} is found."
    return ""


def remedy_lines(report: Report) -> list[RemedyLine]:
    """All fixes: those that work, those that do not, those that were not tried, those that are only proposed."""
    ordered = sorted(report.trials, key=lambda trial: _ORDER.index(trial.outcome))
    return [*(_of_trial(trial, report) for trial in ordered), *_only_proposed(report)]


def _of_trial(trial: Trial, report: Report) -> RemedyLine:
    mark = _DIAGNOSTIC if trial.diagnostic is not None else "" if trial.safe else _MARK
    return RemedyLine(
        id=trial.remedy,
        change=_sentence(trial.summary) + mark,
        outcome=outcome_words(trial, here=report.replay is not None),
        reason=trial.reason,
        result=_result(trial, report),
        cures=_is_fix(trial),
        safe=trial.safe,
    )


def _is_fix(trial: Trial) -> bool:
    return trial.outcome is Outcome.FIXED and trial.diagnostic is None and not trial.remains


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
