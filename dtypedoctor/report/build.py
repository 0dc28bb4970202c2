"""Makes the Report of a run or a bisection, and writes it into the run directory."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dtypedoctor.analysis import ending_of, noted
from dtypedoctor.diagnosis.distributed import coverage_of
from dtypedoctor.diagnosis.wording import named_in, own_frame, shown_line
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.capsules import is_replay, same_verdict
from dtypedoctor.examination.processes import ranks_of
from dtypedoctor.examination.results import Treatment
from dtypedoctor.foreign_files import working_directory, write_file
from dtypedoctor.plugins import left_out
from dtypedoctor.redaction.redact import redact
from dtypedoctor.replay.capsule import MODEL, Capsule, NoCapsule, read_capsule
from dtypedoctor.replay.script import TENSORS, CannotBeWrittenError, capsule_script
from dtypedoctor.report.advice import PATCH, diff_of
from dtypedoctor.report.magnitude_table import origin_strip
from dtypedoctor.report.model import Report, Status
from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.to_json import render_json
from dtypedoctor.report.to_md import render_markdown
from dtypedoctor.report.verdict import measured_in, missing_end, verdict
from dtypedoctor.text import one_line
from dtypedoctor.trace.events import NOT_HERE, WORKED_ELSEWHERE, Metric, NotWatched, Raised, Sample, ScalerState
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import HeldInput, NonfiniteReached

REPORT_JSON = "report.json"
REPORT_MD = "report.md"


def build_report(treatment: Treatment, *, command: str, files: dict[str, str], next_command: str) -> Report:
    """Everything that is said about a treated scenario.

    Args:
        treatment: what was found out.
        command: the command line that led here.
        files: where things lie in the run directory, by name.
        next_command: what to type next.
    """
    findings = tuple(named_in(treatment.before.trace, finding) for finding in treatment.findings)
    treatment, (met, sentence) = replace(treatment, findings=findings), treatment.expectation
    primary = treatment.findings[0] if treatment.findings else None
    measured = measured_in([run.trace for run in treatment.before.processes], treatment.before.trace)
    status, headline = verdict(treatment, measured)
    return Report(
        name=treatment.name,
        status=status,
        headline=headline,
        findings=findings,
        do_this=treatment.advice,
        excerpts=treatment.excerpts,
        noticed=noticed_in(treatment) if treatment.findings else "",
        trials=treatment.trials,
        before=treatment.before_summary,
        trace_usable=any(run.trace.usable for run in treatment.before.processes),
        reference=treatment.reference_summary,
        strip=origin_strip(treatment.before.trace, primary) if status is not Status.HEALTHY else (),
        observer=treatment.observer,
        coverage=tuple(dict.fromkeys(_coverage(treatment))),
        measured=measured.counts,
        capsule=_capsule_facts(treatment.capsule),
        replay=_replay_facts(treatment),
        environment=treatment.before.trace.environment,
        scenario=treatment.scenario,
        files=files,
        command=command,
        expectation=sentence,
        expectation_met=met,
        next_command=next_command,
        rerun=f"Rerun with {treatment.rerun}." if treatment.rerun else "",
    )


SHORT_SCRIPT = 150
"""Lines up to which a report shows the stand-alone script of a capsule."""


def _capsule_facts(capsule: Capsule | NoCapsule | None) -> dict[str, Any] | None:
    """``capsule`` of report.json."""
    if capsule is None:
        return None
    if isinstance(capsule, NoCapsule):
        return {"why": capsule.why}
    try:
        script = capsule_script(capsule, inline=True)
    except CannotBeWrittenError:
        script = ""
    is_short = len(script.splitlines()) <= SHORT_SCRIPT and TENSORS not in script
    return {
        "directory": capsule.directory.name,
        "module": capsule.fqn,
        "class": capsule.cls,
        "bytes": capsule.bytes,
        "holds": capsule.holds,
        "allow_code": any(capsule.code()),
        "fixes": [asdict(fix) for fix in capsule.fixes],
        "script": script if is_short else "",
    }


def _replay_facts(treatment: Treatment) -> dict[str, Any] | None:
    """``replay`` of report.json."""
    if not is_replay(treatment.scenario):
        return None
    model = {"dtype": "float32"} | treatment.scenario["steps"][0]["model"]
    try:
        capsule = read_capsule(Path(model["name"].removeprefix(MODEL)))
    except UsageError:  # an older run is reported on, and its capsule is gone
        return None
    here = working_directory()
    inside = here is not None and capsule.directory.is_relative_to(here) and capsule.directory != here
    return {
        "module": capsule.fqn,
        "class": capsule.cls,
        "capsule": str(capsule.directory.relative_to(here)) if here is not None and inside else capsule.directory.name,
        "dtype": model["dtype"],
        "op": capsule.finding.get("op"),
        "verdict": same_verdict(capsule, treatment.findings) if model["dtype"] == capsule.dtype else "",
        "inside": treatment.inside,
    }


def _of_others(treatment: Treatment) -> Iterator[str]:
    """What was not covered of the other processes of a script that has spawned some."""
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
    yield from (one.gap for one in left_out())
    yield from noted(treatment.before, treatment.findings)
    yield from (f"trace: {damage}" for damage in trace.damage)
    yield from treatment.refusals
    if trace.end is None and not treatment.before.deleted:
        yield missing_end(treatment.before)
    if trace.folded is not None:
        yield trace.folded.describe()
    yield from _held_inputs(treatment)
    if treatment.replayed:
        yield treatment.replayed
    elif treatment.findings:
        yield f"op trace: {treatment.no_op_trace}"


def _held_inputs(treatment: Treatment) -> Iterator[str]:
    """What the last calls before a device-side assert were given."""
    held = [seen.what for seen in treatment.before.trace.observed(HeldInput)]
    outside = [what for what in held if what.rows is not None and not 0 <= what.least <= what.most < what.rows]
    for what in outside or held[-1:]:
        table = f"; the smallest embedding has {what.rows:,} rows" if what.rows is not None else ""
        yield (
            f"{what.name} of call {what.of}, before the device stopped: {what.dtype} {what.shape}, {what.least:,} to {what.most:,}{table} "
            f"(its values are data, and lie in {treatment.before.directory.name}/{what.file})"
        )


def write_report(directory: Path, report: Report) -> None:
    """Writes ``report.json`` and ``report.md`` into ``directory``, and ``do-this.patch`` where there is an edit for the first finding.

    Reports are attached to public tickets, so private strings are replaced first; ``report`` itself, for the person at
    the prompt, keeps them.
    """
    public = redact(report)
    write_file(directory / REPORT_JSON, render_json(public))
    write_file(directory / REPORT_MD, render_markdown(run_document(public)))
    edits = report.do_this[0].edits if report.do_this else ()
    if edits and Path(edits[0].file).is_file():  # not a cell of a notebook; what may be a secret is in no edit
        write_file(directory / PATCH, f"{diff_of(edits)}\n")


_SPELLED = {"nan": "NaN"}


def noticed_in(treatment: Treatment) -> str:
    """Say what the program itself showed of a failure, which is rarely the line to change: a loss that is not finite, the exception; empty if nothing."""
    run = treatment.before
    loss = _bad_loss(run.trace)
    ending = ending_of(run)
    if ending.raised is None:
        return loss
    line = _own_line(ending.raised)
    words = ending.words.replace(ending.raised.type, f"{ending.raised.type} at {line}", 1) if line else ending.words
    return one_line(f"{loss}; then {words}" if loss else words, 400)


def _bad_loss(trace: Trace) -> str:
    """The first loss that is not finite: what it is, in which step, and the line that used it."""
    name = "the loss times GradScaler's scale" if trace.all(ScalerState) else "the loss"
    for sample, site in trace.measured():
        if site.kind == "loss" and not sample.finite:
            line = _line_of(trace, sample)
            return f"{name} is {'NaN' if sample.num_nan else 'inf'} in {trace.moment(sample.step)}" + (
                f", at {line}" if line else ""
            )
    for metric in trace.all(Metric):
        if "loss" in metric.nonfinite:
            value = metric.spelled.get("loss", "nan")
            return f"the loss is {_SPELLED.get(value, value)} in {trace.moment(metric.step)}"
    return ""


def _line_of(trace: Trace, loss: Sample) -> str:
    """The line at which a backward pass began with this loss, or else the first one that read it as a number; empty where neither is known."""
    seen = [one.what for one in trace.observed(NonfiniteReached)]
    began = next((one for one in seen if one.sample == loss.n), None)
    if began is None:
        return ""
    read = [one.source for one in seen if one.id == began.id and one.what in ("item", "guard")]
    return next(filter(None, [began.source, *read]), "")


def _own_line(raised: Raised) -> str:
    """``train.py:31`` of the program's innermost frame; empty where no frame is the program's."""
    own = own_frame(raised)
    return shown_line(own.rpartition(" ")[0]) if own is not None else ""
