"""Makes the Report of a run or a bisection, and writes it into the run directory."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dtypedoctor.analysis import analysis_of, ending_of, noted
from dtypedoctor.diagnosis import spec_of
from dtypedoctor.diagnosis.distributed import coverage_of
from dtypedoctor.diagnosis.incidents import same_call
from dtypedoctor.diagnosis.rule import Confidence, Edit, Finding
from dtypedoctor.diagnosis.scene import LARGEST_SOURCE
from dtypedoctor.diagnosis.wording import class_of, named_in, own_frame, shown_line, with_spoken_operators
from dtypedoctor.dtypes import headroom
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.capsules import is_replay, same_verdict
from dtypedoctor.examination.processes import ranks_of
from dtypedoctor.examination.results import Treatment
from dtypedoctor.foreign_files import read_file, working_directory, write_file
from dtypedoctor.plugins import left_out
from dtypedoctor.redaction.redact import redact
from dtypedoctor.replay.capsule import MODEL, Capsule, NoCapsule, read_capsule
from dtypedoctor.replay.script import TENSORS, CannotBeWrittenError, capsule_script
from dtypedoctor.report.error_budget import budget_in
from dtypedoctor.report.precisions import precisions_in
from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.run_facts import PATCH, diff_of
from dtypedoctor.report.to_json import Report, Status, StripRow, render_json
from dtypedoctor.report.to_md import render_markdown
from dtypedoctor.report.verdict import measured_in, missing_end, verdict
from dtypedoctor.text import one_line
from dtypedoctor.trace.events import (
    NOT_HERE,
    WORKED_ELSEWHERE,
    Metric,
    NotWatched,
    Op,
    Sample,
    ScalerState,
    Site,
)
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import NonfiniteReached

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
    advice = (replace(one, text=with_spoken_operators(one.text)) for one in treatment.advice)
    return Report(
        name=treatment.name,
        status=status,
        headline=with_spoken_operators(headline),
        findings=findings,
        do_this=tuple(advice),
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
        error_budget=budget_in(treatment.before.trace),
        precisions=precisions_in(treatment.before.trace),
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
        "source": capsule.finding.get("source"),
        "verdict": same_verdict(capsule, treatment.findings) if model["dtype"] == capsule.dtype else "",
        "inside": treatment.inside,
    }


def _coverage(treatment: Treatment) -> Iterator[str]:
    trace = treatment.before.trace
    yield from coverage_of(ranks_of(treatment.before))
    for note in trace.all(NotWatched):
        yield f"{note.what}: {note.why}"
    for run in treatment.before.others:  # the other processes of a script that has spawned some
        if not run.trace.usable:
            yield "a spawned process: it left no trace"
            continue
        for note in run.trace.all(NotWatched):
            if run.trace.samples or note.why in (NOT_HERE, WORKED_ELSEWHERE):
                yield f"{note.what}: {note.why}"
        yield from (f"trace: {damage}" for damage in run.trace.damage)
    yield from (one.gap for one in left_out())
    yield from noted(treatment.before, treatment.findings)
    yield from (f"trace: {damage}" for damage in trace.damage)
    yield from treatment.refusals
    if trace.end is None and not treatment.before.deleted:
        yield missing_end(treatment.before)
    if trace.folded is not None:
        yield trace.folded.describe()
    if treatment.replayed:
        yield treatment.replayed
    elif treatment.findings:
        yield f"op trace: {treatment.no_op_trace}"


BEFORE, AFTER = 6, 4
"""How many modules are shown before and after the first one that is not finite."""


def origin_strip(trace: Trace, finding: Finding | None) -> tuple[StripRow, ...]:
    """The modules that returned just before and after the failure; empty where all is finite.

    The failure is the first non-finite value: where dtypes disagree, magnitudes mean nothing, and there is no strip. An
    origin that is not itself among the modules shown (the op lies between two children of it) has a row of its own before
    the first bad one.
    """
    first = analysis_of(trace).first_nonfinite
    if first is None:
        return ()
    if (
        finding is not None
    ):  # one about something else, or where it was only seen first, does not say where the value comes from
        only_seen = finding.op is None and finding.confidence is Confidence.POSSIBLE
        finding = finding if spec_of(finding.id).nonfinite and not only_seen else None
    anchor = first[0]
    around = _distinct(same_call(trace, anchor), anchor)
    place = next(i for i, (s, _) in enumerate(around) if s is anchor)
    shown = around[max(0, place - BEFORE) : place + AFTER + 1]
    rows = [_row(s, site, finding) for s, site in shown]
    if finding is not None and finding.fqn and not any(row.is_origin for row in rows):
        at = next(i for i, (s, _) in enumerate(shown) if s is anchor)
        rows.insert(at, _origin_row(trace, finding))
    return tuple(rows)


def _distinct(measured: list[tuple[Sample, Site]], keep: Sample) -> list[tuple[Sample, Site]]:
    """Leaves out containers that return what their last child has returned, unless it is the one to keep."""
    distinct: list[tuple[Sample, Site]] = []
    last_name, last_values = "", tuple[object, ...]()
    for sample, site in measured:
        values = (sample.absmax, sample.num_nan, sample.num_inf, site.dtype, site.shape)
        if sample is keep or not last_name.startswith(site.fqn) or values != last_values:
            distinct.append((sample, site))
            last_name, last_values = site.fqn, values
    return distinct


def _row(sample: Sample, site: Site, finding: Finding | None) -> StripRow:
    return StripRow(
        fqn=site.fqn,
        cls=site.cls,
        dtype=site.dtype,
        absmax=sample.absmax,
        num_nan=sample.num_nan,
        num_inf=sample.num_inf,
        headroom=headroom(sample.absmax, site.dtype),
        is_origin=finding is not None and site.fqn == finding.fqn,
    )


def _origin_row(trace: Trace, finding: Finding) -> StripRow:
    """The origin as its op left it, where the op was traced."""
    fqn = finding.fqn or ""
    made = [
        t
        for op in trace.all(Op)
        if op.fqn == fqn and op.op == finding.op and op.step == finding.step
        for t in op.outputs
    ]
    result = next((tensor for tensor in made if not tensor.finite), made[-1] if made else None)
    absmax = result.absmax if result else None
    dtype = (result.dtype if result else None) or finding.dtype or ""
    return StripRow(
        fqn=fqn,
        cls=class_of(trace, fqn),
        dtype=dtype,
        absmax=absmax,
        num_nan=result.num_nan if result else 0,
        num_inf=result.num_posinf + result.num_neginf if result else 0,
        headroom=headroom(absmax, dtype) if absmax is not None else None,
        is_origin=True,
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
    # Not a cell of a notebook, nor what lies there already; what may be a secret is in no edit
    if edits and "patch" not in report.files and Path(edits[0].file).is_file():
        write_file(directory / PATCH, patch_of(edits))


def patch_of(edits: tuple[Edit, ...]) -> str:
    """What ``patch -p0`` takes: the lines end as those of the file that they change, else it finds none of them."""
    ends_in_cr = {}
    for file in {edit.file for edit in edits}:
        data = read_file(Path(file), LARGEST_SOURCE) if Path(file).is_file() else b""
        ends_in_cr[file] = data.count(b"\n") == data.count(b"\r\n") > 0
    ended = (
        replace(edit, old=f"{edit.old}\r", new=edit.new and edit.new.replace("\n", "\r\n") + "\r")
        if ends_in_cr[edit.file]
        else edit
        for edit in edits
    )
    return f"{diff_of(tuple(ended))}\n" if edits else ""


_SPELLED = {"nan": "NaN"}


def noticed_in(treatment: Treatment) -> str:
    """Say what the program itself showed of a failure, which is rarely the line to change: a loss that is not finite, the exception; empty if nothing."""
    run = treatment.before
    loss = _bad_loss(run.trace)
    ending = ending_of(run)
    if ending.raised is None:
        return loss
    own = own_frame(ending.raised)
    line = (
        shown_line(own.rpartition(" ")[0]) if own is not None else ""
    )  # as train.py:31, of the program's innermost frame
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
