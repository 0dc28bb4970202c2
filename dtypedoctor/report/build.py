"""Makes the Report of a treatment."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.report.model import Outcome, Report, Status
from dtypedoctor.report.origin_strip import origin_strip
from dtypedoctor.trace.events import NotWatched, Root
from dtypedoctor.trials.expectation import expectation_on, is_met
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
        coverage=tuple(_coverage(treatment)),
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
    return Status.HEALTHY if treatment.before_summary.ended == "completed" else Status.ERROR


def _headline(treatment: Treatment, primary: Finding | None) -> str:
    if primary is not None:
        cures = [t.remedy for t in treatment.trials if t.outcome is Outcome.FIXED]
        if cures:
            return f"{primary.summary} Cured by {' or '.join(cures)}."
        return primary.summary
    before = treatment.before_summary
    if treatment.before.died:
        who = "script" if treatment.before.foreign else "worker"
        return f"The {who} {treatment.before.last_words()}{_last_module(treatment)}."
    if before.ended.startswith(INTERRUPTED):
        return f"Nothing found until the run was {before.ended}."
    if before.ended != "completed":
        return f"The run failed, but not through its dtypes as far as could be seen: {before.ended}"
    return f"Nothing found: {_done(treatment)}."


def _done(treatment: Treatment) -> str:
    """What a healthy run did, in words."""
    before = treatment.before_summary
    if before.steps_planned:
        return f"{before.steps_completed} of {before.steps_planned} steps done, everything finite"
    if not treatment.before.trace.all(Root):
        return "the script has not called any module, so there was nothing to see"
    return f"the script came to its end after {before.steps_completed} optimizer step(s), everything finite"


def _last_module(treatment: Treatment) -> str:
    cursor = treatment.before.trace.cursor
    if cursor is None or cursor.site is None:
        return " before any module was entered"
    return f"; the last module entered was {cursor.site.fqn or cursor.site.cls} in step {cursor.step} ({cursor.site.phase})"


def _cut_short(treatment: Treatment) -> str:
    if treatment.before.foreign and not treatment.before.died:
        return (
            "the end of the run: the script left without letting Python finish (os._exit, or it became another program)"
        )
    return "the end of the run: the trace has no end record, so the last moments may be missing"


def _coverage(treatment: Treatment) -> Iterator[str]:
    trace = treatment.before.trace
    for note in trace.all(NotWatched):
        yield f"{note.what}: {note.why}"
    yield from (f"trace: {damage}" for damage in trace.damage)
    if trace.end is None:
        yield _cut_short(treatment)
    if treatment.findings and treatment.closer is None:
        yield f"single operations: {treatment.no_closer}"
