"""Makes the Report of a treatment."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.distributed import coverage_of
from dtypedoctor.report.last_moments import missing_end
from dtypedoctor.report.measured import measured_in
from dtypedoctor.report.model import Report, Status
from dtypedoctor.report.origin_strip import origin_strip
from dtypedoctor.report.verdict import verdict
from dtypedoctor.trace.events import NOT_HERE, WORKED_ELSEWHERE, NotWatched
from dtypedoctor.trials.caught import noted
from dtypedoctor.trials.expectation import expectation_on, is_met
from dtypedoctor.trials.ranks import ranks_of
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
    measured = measured_in([run.trace for run in treatment.before.processes], treatment.diagnosed)
    status, headline = verdict(treatment, measured)
    return Report(
        name=scenario.name,
        status=status,
        headline=headline,
        findings=treatment.findings,
        trials=treatment.trials,
        before=treatment.before_summary,
        trace_usable=any(run.trace.usable for run in treatment.before.processes),
        reference=treatment.reference_summary,
        strip=origin_strip(treatment.diagnosed, primary) if status is not Status.HEALTHY else (),
        observer=treatment.observer,
        coverage=tuple(dict.fromkeys(_coverage(treatment))),
        measured=measured.counts,
        environment=treatment.before.trace.environment,
        scenario=scenario.model_dump(mode="json", exclude_defaults=True),
        files=files,
        command=command,
        expectation=sentence if judged else "",
        expectation_met=met if judged else None,
        next_command=next_command,
    )


def _of_others(treatment: Treatment) -> Iterator[str]:
    """What was not watched of the other processes of a script that has spawned some."""
    for run in treatment.before.others:
        if not run.trace.usable:
            yield "a spawned process: it left no trace"
        for note in run.trace.all(NotWatched):
            if run.trace.samples or note.why in (NOT_HERE, WORKED_ELSEWHERE):
                yield f"{note.what}: {note.why}"
        yield from (f"trace: {damage}" for damage in run.trace.damage if run.trace.usable)


def _coverage(treatment: Treatment) -> Iterator[str]:
    trace = treatment.before.trace
    yield from coverage_of(ranks_of(treatment.before))
    for note in trace.all(NotWatched):
        yield f"{note.what}: {note.why}"
    yield from _of_others(treatment)
    yield from noted(treatment.before)
    yield from (f"trace: {damage}" for damage in trace.damage)
    yield from treatment.refusals
    if trace.end is None:
        yield missing_end(treatment.before)
    if trace.folded is not None:
        yield trace.folded.describe()
    if treatment.findings and treatment.closer is None:
        yield f"single operations: {treatment.no_closer}"
