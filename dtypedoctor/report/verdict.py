"""The verdict on a run: its status and its headline. Whatever they claim is decided here, from what was measured."""

from dtypedoctor.analysis import How, ending_of
from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.window import doubt_in_words
from dtypedoctor.report.last_moments import last_module
from dtypedoctor.report.measured import Measured
from dtypedoctor.report.model import Status
from dtypedoctor.report.remedy_lines import cured_sentence
from dtypedoctor.report.text import one_line
from dtypedoctor.runner.launch import Run
from dtypedoctor.trace.events import FAILED_THERE, NO_TORCH, NOT_HERE, NOTHING_WATCHED, WORKED_ELSEWHERE, NotWatched
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.treatment import Treatment

__all__ = ["verdict"]


def verdict(treatment: Treatment, measured: Measured) -> tuple[Status, str]:
    """The status of the untreated run, and one sentence that says why. *Healthy* is said only of what was measured.

    Args:
        treatment: what was found out.
        measured: how much of the run was measured, and whether that was finite.
    """
    primary = treatment.findings[0] if treatment.findings else None
    found = primary is not None and primary.severity is not Severity.INFO
    if primary is not None and found:
        status = Status.WORKER_DIED if treatment.before.died else Status.FINDINGS
        return status, f"{primary.summary}{cured_sentence(treatment.trials)}"
    if treatment.before.died:
        where = last_module(treatment.before.trace)
        return Status.WORKER_DIED, f"{_who(treatment.before)} {treatment.before.last_words()}{where}."
    return _without_findings(treatment, measured, primary)


def _without_findings(treatment: Treatment, measured: Measured, noted: Finding | None) -> tuple[Status, str]:
    trace, ending = treatment.before.trace, ending_of(treatment.before)
    if ending.how is How.INTERRUPTED:
        return Status.ERROR, f"Nothing found until the run was {ending.words}."
    if not ending.completed:
        unseen = "".join(f" ({lack})" for lack in (_lack(treatment, measured),) if lack)
        return Status.ERROR, f"The run failed; nothing precision-related was found{unseen}: {ending.words}"
    if blind := next((note.why for note in trace.all(NotWatched) if note.what == NOTHING_WATCHED), ""):
        return Status.ERROR, f"Nothing was watched: {blind}."
    if measured.matters:
        return Status.UNKNOWN, _capital(f"{measured.matters} is not finite, and no detector explains it.")
    if trace.damage or any(run.trace.damage for run in treatment.before.processes if run.trace.usable):
        return (
            Status.ERROR,
            f"Nothing found, but only a part of the trace could be read: {_as_far_as_known(trace, measured)}.",
        )
    if lack := _lack(treatment, measured):
        return Status.UNKNOWN, f"{_capital(lack)}."
    if elsewhere := [note.what for note in trace.all(NotWatched) if note.why == WORKED_ELSEWHERE]:
        known = _as_far_as_known(trace, measured)
        return (
            Status.UNKNOWN,
            f"Nothing found in this process, but not measured: {one_line(', '.join(elsewhere), 200)}; {known}.",
        )
    if treatment.closer is None and (doubt := doubt_in_words(trace)):
        return Status.UNKNOWN, f"Nothing found, but {doubt}."
    return Status.HEALTHY, _healthy(treatment, measured, noted)


def _healthy(treatment: Treatment, measured: Measured, noted: Finding | None) -> str:
    trace = treatment.before.trace
    if trace.end is None:
        known = _as_far_as_known(trace, measured)
        return f"Nothing found until the script left without letting Python finish: {known}."
    if treatment.observer.bitwise_equal is False:
        return f"Nothing found with instrumentation, but it changed the run: {treatment.observer.reason}."
    failed = [note.what for note in trace.all(NotWatched) if note.why.startswith(FAILED_THERE)]
    unchecked = f" Not checked, because dtypedoctor failed there: {one_line(', '.join(failed), 200)}." if failed else ""
    also = f" Noted: {noted.summary}" if noted is not None else ""
    return f"Nothing found{' that is wrong' if also else ''}: {_done(treatment)}, {_finiteness(measured)}.{unchecked}{also}"


def _lack(treatment: Treatment, measured: Measured) -> str:
    """What keeps the run from being called healthy because it was not measured; empty where enough was."""
    if measured.nothing and not measured.ran:
        return _nothing_ran(treatment.before.trace)
    missing = list(measured.missing())
    return f"{' and '.join(missing)} could be measured" if missing else ""


def _nothing_ran(trace: Trace) -> str:
    notes = trace.all(NotWatched)
    what = (
        "this process did not import torch"
        if any(n.why == NO_TORCH for n in notes)
        else "no nn.Module ran in this process"
    )
    elsewhere = " and ".join(one_line(note.what, 120) for note in notes if note.why in (NOT_HERE, WORKED_ELSEWHERE))
    return what + (f"; {elsewhere} not watched" if elsewhere else "")


def _finiteness(measured: Measured) -> str:
    """What may be said of the values: the one place that says that they are finite."""
    if not measured.bad:
        return "everything measured is finite"
    return f"inf or NaN ({measured.bad}) reaches no loss, used gradient or parameter"


def _as_far_as_known(trace: Trace, measured: Measured) -> str:
    return f"{trace.steps_done} step(s) are known to be done, {_finiteness(measured)}"


def _who(run: Run) -> str:
    if run.rank is not None:
        return f"Rank {run.rank} of {len(run.ranks)}"
    return "The script" if run.foreign else "The worker"


def _done(treatment: Treatment) -> str:
    """How far a run that came to its end got, in words."""
    before = treatment.before_summary
    if before.steps_planned:
        return f"{before.steps_completed} of {before.steps_planned} steps done"
    return f"the script came to its end after {before.steps_completed} optimizer step(s)"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if text.startswith("the ") else text
