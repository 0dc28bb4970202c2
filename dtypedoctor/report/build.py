"""Makes the Report of a treatment."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.distributed import coverage_of
from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.report.last_moments import last_module, missing_end
from dtypedoctor.report.model import Report, Status
from dtypedoctor.report.origin_strip import origin_strip
from dtypedoctor.report.remedy_lines import cured_sentence
from dtypedoctor.runner.launch import Run
from dtypedoctor.trace.events import NOTHING_WATCHED, NotWatched, Root
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.expectation import expectation_on, is_met
from dtypedoctor.trials.ranks import ranks_of
from dtypedoctor.trials.summary import INTERRUPTED
from dtypedoctor.trials.treatment import Treatment


def build_report(treatment: Treatment, *, command: str, files: dict[str, str], next_command: str) -> Report:
    """Everything that is said about a treated scenario.

    Args:
        treatment: what was found out.
        command: the command line that led here.
        files: where things lie in the run directory, by name.
        next_command: what to type next.
    """
    scenario = treatment.scenario
    expect = expectation_on(scenario.expect, str(treatment.before.trace.environment.get("device", "")))
    judged = bool(expect.findings) and treatment.complete
    met, sentence = is_met(expect, treatment.findings, treatment.trials)
    primary = treatment.findings[0] if treatment.findings else None
    return Report(
        name=scenario.name,
        status=_status(treatment),
        headline=_headline(treatment, primary),
        findings=treatment.findings,
        trials=treatment.trials,
        before=treatment.before_summary,
        reference=treatment.reference_summary,
        strip=origin_strip(treatment.diagnosed, primary),
        observer=treatment.observer,
        coverage=tuple(dict.fromkeys(_coverage(treatment))),
        environment=treatment.before.trace.environment,
        scenario=scenario.model_dump(mode="json", exclude_defaults=True),
        files=files,
        command=command,
        expectation=sentence if judged else "",
        expectation_met=met if judged else None,
        next_command=next_command,
    )


def _status(treatment: Treatment) -> Status:
    if treatment.before.died:
        return Status.WORKER_DIED
    if any(f.severity is not Severity.INFO for f in treatment.findings):
        return Status.FINDINGS
    trace = treatment.before.trace  # a run of which a part is not known cannot be called healthy
    whole = not trace.damage and not _why_blind(trace)
    return Status.HEALTHY if whole and treatment.before_summary.ended == "completed" else Status.ERROR


def _headline(treatment: Treatment, primary: Finding | None) -> str:
    if primary is not None and primary.severity is not Severity.INFO:
        return f"{primary.summary}{cured_sentence(treatment.trials)}"
    before = treatment.before_summary
    if treatment.before.died:
        return f"{_who(treatment.before)} {treatment.before.last_words()}{_last_module(treatment)}."
    if before.ended.startswith(INTERRUPTED):
        return f"Nothing found until the run was {before.ended}."
    if before.ended != "completed":
        return f"The run failed, but not through its dtypes as far as could be seen: {before.ended}"
    if blind := _why_blind(treatment.before.trace):
        return f"Nothing was watched: {blind}."
    if treatment.before.trace.damage:
        return f"Nothing found, but only a part of the trace could be read: {_as_far_as_known(treatment)}."
    if treatment.before.trace.end is None:
        return f"Nothing found until the script left without letting Python finish: {_as_far_as_known(treatment)}."
    if treatment.observer.bitwise_equal is False:
        return f"Nothing found while it was watched, but the watch changed the run: {treatment.observer.reason}."
    noted = f" Noted: {primary.summary}" if primary is not None else ""
    return f"Nothing found{' that is wrong' if noted else ''}: {_done(treatment)}.{noted}"


def _why_blind(trace: Trace) -> str:
    """Why nothing at all was watched; empty where something was."""
    return next((note.why for note in trace.all(NotWatched) if note.what == NOTHING_WATCHED), "")


def _as_far_as_known(treatment: Treatment) -> str:
    done = treatment.before.trace.steps_done
    return f"{done} step(s) are known to be done, and everything that was recorded is finite"


def _who(run: Run) -> str:
    if run.rank is not None:
        return f"Rank {run.rank} of {len(run.ranks)}"
    return "The script" if run.foreign else "The worker"


def _done(treatment: Treatment) -> str:
    """What a healthy run did, in words."""
    before = treatment.before_summary
    if before.steps_planned:
        return f"{before.steps_completed} of {before.steps_planned} steps done, everything finite"
    if not treatment.before.trace.all(Root):
        return "the script has not called any module, so there was nothing to see"
    return f"the script came to its end after {before.steps_completed} optimizer step(s), everything finite"


def _last_module(treatment: Treatment) -> str:
    return last_module(treatment.before.trace)


def _coverage(treatment: Treatment) -> Iterator[str]:
    trace = treatment.before.trace
    yield from coverage_of(ranks_of(treatment.before))
    for note in trace.all(NotWatched):
        yield f"{note.what}: {note.why}"
    yield from (f"trace: {damage}" for damage in trace.damage)
    if trace.end is None:
        yield missing_end(treatment.before)
    if trace.folded is not None:
        yield trace.folded.describe()
    if treatment.findings and treatment.closer is None:
        yield f"single operations: {treatment.no_closer}"
