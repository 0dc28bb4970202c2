"""Makes the Report of a run or a bisection, and writes it into the run directory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from dtypedoctor.analysis import noted
from dtypedoctor.diagnosis.distributed import coverage_of
from dtypedoctor.diagnosis.rule import Severity
from dtypedoctor.errors import UsageError
from dtypedoctor.plugins import left_out
from dtypedoctor.redaction.redact import redact
from dtypedoctor.replay.capsule import MODEL, Capsule, NoCapsule, read_capsule
from dtypedoctor.replay.script import TENSORS, CannotBeWrittenError, capsule_script
from dtypedoctor.report.magnitude_table import origin_strip
from dtypedoctor.report.model import Report, Status
from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.text import counted, number
from dtypedoctor.report.to_json import render_json
from dtypedoctor.report.to_markdown import render_markdown
from dtypedoctor.report.verdict import measured_in, missing_end, verdict
from dtypedoctor.trace.events import NOT_HERE, WORKED_ELSEWHERE, NotWatched
from dtypedoctor.trace.records.execution import HeldInput
from dtypedoctor.trials.bisection.results import Answer, Bisection, End, Kind, Symptom, Verdict
from dtypedoctor.trials.bisection.symptoms import part_in_words
from dtypedoctor.trials.capsules import is_replay, same_verdict
from dtypedoctor.trials.judge import expectation_on, is_met
from dtypedoctor.trials.results import Outcome, Treatment
from dtypedoctor.trials.runs import ranks_of

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
        capsule=_capsule_facts(treatment.capsule),
        replay=_replay_facts(treatment),
        environment=treatment.before.trace.environment,
        scenario=scenario.model_dump(mode="json", exclude_defaults=True),
        files=files,
        command=command,
        expectation=sentence if judged else "",
        expectation_met=met if judged else None,
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
        "script": script if is_short else "",
    }


def _replay_facts(treatment: Treatment) -> dict[str, Any] | None:
    """``replay`` of report.json."""
    model = treatment.scenario.steps[0].model
    if model is None or not is_replay(treatment.scenario):
        return None
    try:
        capsule = read_capsule(Path(model.name.removeprefix(MODEL)))
    except UsageError:  # an older run is reported on, and its capsule is gone
        return None
    here = Path.cwd()
    inside = capsule.directory.is_relative_to(here) and capsule.directory != here
    return {
        "module": capsule.fqn,
        "class": capsule.cls,
        "capsule": str(capsule.directory.relative_to(here)) if inside else capsule.directory.name,
        "dtype": model.dtype,
        "op": capsule.finding.get("op"),
        "verdict": same_verdict(capsule, treatment.findings) if model.dtype == capsule.dtype else "",
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
    yield from noted(treatment.before)
    yield from (f"trace: {damage}" for damage in trace.damage)
    yield from treatment.refusals
    if trace.end is None:
        yield missing_end(treatment.before)
    if trace.folded is not None:
        yield trace.folded.describe()
    yield from _held_inputs(treatment)
    if treatment.replayed:
        yield treatment.replayed
    elif treatment.findings and treatment.closer is None:
        yield f"op trace: {treatment.no_closer}"


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


_MOST_NAMED = 5
_NEAR_THE_END = 0.5
"""Share of a dtype's max above which a healthy run says so: a factor of two is little for activations."""


def answer(found: Bisection) -> str:
    """The answer for a person."""
    return _ANSWERS[found.end](found)


def _found(found: Bisection) -> str:
    if not found.confirmed:
        reason = found.trials[0].reason if found.trials else "that was not tried"
        return f"Keeping {_kept(found)} in float32 fixes {found.workload}, but not the whole run: {reason}."
    story = f"Smallest fix: keep {_kept(found)} in float32. Without it: {found.failure.reason}."
    return f"{story}{_by_corrections(found)}{_now_and_then(found)}"


def _now_and_then(found: Bisection) -> str:
    result = found.modules.result if found.modules is not None else None
    if result is None or not result.flaky:
        return ""
    return " The failure is flaky: repeated runs differ, so this may be chance. Bisect again to confirm it."


def _by_corrections(found: Bisection) -> str:
    """Corrections that are enough as well, or how far they are; nothing where there are none."""
    names = found.corrections.culprits if found.corrections is not None else ()
    trial = next((t for t in found.trials if t.remedy == "+".join(names)), None)
    if not names or trial is None:
        return ""
    alone = " alone" if len(names) < len(found.offered) else ""
    corrections = f"{'correction' if len(names) == 1 else 'corrections'} {_enumerated(names)}{alone}"
    if trial.outcome is Outcome.FIXED:
        return f" Also fixed by the {corrections}."
    return f" The {corrections} fixed {found.workload}, but not the whole run: {trial.reason}."


def _kept(found: Bisection) -> str:
    names = [part_in_words(name) for name in found.kept]
    more = len(names) - _MOST_NAMED
    return _enumerated([*names[:_MOST_NAMED], f"{more} more"] if more > 0 else names)


def _enumerated(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def _healthy(found: Bisection) -> str:
    told = (
        f"No failure: everything is finite, no dtype error, and within rounding of float32{_how_near(found)}."
        f"{_near_the_end(found.failure)}"
    )
    others = [finding.id for finding in found.treatment.findings if finding.severity is not Severity.INFO]
    notes = [finding.id for finding in found.treatment.findings if finding.severity is Severity.INFO]
    if others:
        told += f" Bisection cannot search for what else is found: {', '.join(others)}; `dtypedoctor run` tries fixes for it."
    return f"{told} Notes: {', '.join(notes)}." if notes else told


def _near_the_end(healthy: Symptom) -> str:
    """What is close to overflow: other tokens may exceed the max."""
    if healthy.share is None or healthy.share < _NEAR_THE_END or healthy.absmax is None or healthy.fqn is None:
        return ""
    return f" {part_in_words(healthy.fqn)} reaches {number(healthy.absmax)}, {healthy.share:.0%} of its dtype's max."


def _how_near(found: Bisection) -> str:
    return f" ({found.tolerance:.3g} accepted)" if found.tolerance is not None else ""


def _domain_error(found: Bisection) -> str:
    name = "domain-error: it" if found.failure.kind is Kind.NOT_FINITE else "It"
    return f"{name} fails in float32 too, so precision is not the cause ({found.note})."


def _rounded_weights(found: Bisection) -> str:
    return (
        f"Rounding the weights breaks the model: with the rounded weights it fails even in float32 ({found.note}), with the original "
        "ones it does not. Keeping modules in float32 cannot restore them; load these weights in a wider dtype."
    )


def _outside(found: Bisection) -> str:
    return (
        f"The cause is outside the modules: it fails even with all {counted(found.candidates, 'module')} in float32 ({found.note}), "
        "but not in the float32 reference. Check the dtypes of the inputs, the loss and the code between modules."
    )


def _unresolved(found: Bisection) -> str:
    return f"Unresolved, no module can be named: {found.note}."


def _interrupted(found: Bisection) -> str:
    if not found.culprits:
        return f"Interrupted before a result{': ' + found.note if found.note else ''}."
    minimal = found.modules is not None and found.modules.result is not None
    known = "" if minimal else f" Some of these {counted(len(found.culprits), 'module')} may not be needed."
    return f"Interrupted. Keeping {_kept(found)} in float32 fixes {found.workload}.{known}"


_ANSWERS: dict[End, Callable[[Bisection], str]] = {
    End.FOUND: _found,
    End.HEALTHY: _healthy,
    End.DOMAIN_ERROR: _domain_error,
    End.ROUNDED_WEIGHTS: _rounded_weights,
    End.OUTSIDE: _outside,
    End.UNRESOLVED: _unresolved,
    End.INTERRUPTED: _interrupted,
}


def bisection_report(found: Bisection, *, command: str, files: dict[str, str], next_command: str) -> Report:
    """Everything that is said about a bisection: the report of its baseline, with the answers.

    Args:
        found: what was found out.
        command: the command line that led here.
        files: where things lie in the run directory, by name.
        next_command: what to type next.
    """
    report = build_report(found.treatment, command=command, files=files, next_command=next_command)
    failed = not found.failure.healthy
    return replace(
        report,
        status=Status.FINDINGS if failed and report.status is Status.HEALTHY else report.status,
        headline=answer(found),
        trials=found.trials,
        bisection=bisection_section(found),
    )


def bisection_section(found: Bisection) -> dict[str, Any]:
    """``bisection`` of report.json."""
    answers = [answer for answer in (found.modules, found.corrections) if answer is not None]
    results = [answer.result for answer in answers if answer.result is not None]
    return {
        "end": found.end.value,
        "answer": answer(found),
        "workload": found.workload,
        "candidates": found.candidates,
        "culprits": list(found.culprits),
        "corrections": list(found.corrections.culprits) if found.corrections is not None else [],
        "offered": list(found.offered),
        "probes": found.probes,
        "runs": found.runs,
        "one_minimal": bool(results) and all(result.one_minimal for result in results),
        "monotone": all(result.monotone for result in results),
        "flaky": _disagreements(answers),
        "unresolved": sum(result.unresolved for result in results),
        "confirmed": found.confirmed,
        "note": found.note,
        "tolerance": found.tolerance,
        "probe_seconds": median(found.probe_seconds) if found.probe_seconds else None,
        "failure": _symptom(found.failure),
        "verdicts": [_verdict(verdict) for verdict in found.verdicts],
        "cost": asdict(found.cost) if found.cost is not None else None,
        "remedy": _remedy(found),
        "reproduction": asdict(found.reproduction) if found.reproduction is not None else None,
    }


def _disagreements(answers: list[Answer]) -> list[str]:
    """What came out differently when it was run again."""
    return [
        f"with {len(one.treated) or 'nothing'} in float32: {', then '.join(one.outcomes)}"
        for answer in answers
        if answer.result is not None
        for one in answer.result.disagreements
    ]


def _symptom(symptom: Symptom) -> dict[str, Any]:
    return {
        "kind": symptom.kind.value,
        "reason": symptom.reason,
        "phase": symptom.phase,
        "step": symptom.step,
        "fqn": symptom.fqn,
        "absmax": symptom.absmax,
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    symptom = verdict.symptom
    return {
        "mode": verdict.mode,
        "workload": verdict.workload,
        "outcome": verdict.outcome.value,
        "phase": symptom.phase,
        "step": symptom.step,
        "fqn": symptom.fqn,
        "absmax": symptom.absmax,
        "reason": symptom.reason,
        "seconds": symptom.seconds,
    }


def _remedy(found: Bisection) -> dict[str, Any] | None:
    """What to put under ``corrections`` of a scenario: the corrections where they cure the whole run, else the culprits."""
    if found.corrections is not None and found.corrections.culprits:
        names = found.corrections.culprits
        cured = {trial.remedy for trial in found.trials if trial.outcome is Outcome.FIXED}
        if "+".join(names) in cured:
            return {"corrections": [{"id": name} for name in names]}
    if found.confirmed:
        return {"corrections": [{"id": "keep-float32", "modules": list(found.kept)}]}
    return None


def write_report(directory: Path, report: Report) -> None:
    """Writes ``report.json`` and ``report.md`` into ``directory``.

    Reports are attached to public tickets, so private strings are replaced first; ``report`` itself, for the person at
    the prompt, keeps them.
    """
    public = redact(report)
    _replace(directory / REPORT_JSON, render_json(public))
    _replace(directory / REPORT_MD, render_markdown(run_document(public)))


def _replace(path: Path, text: str) -> None:
    """Writes a file as a whole: readers see the old content or the new one, never half of it."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)
