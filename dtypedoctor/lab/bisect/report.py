"""Makes the Report of a bisection: the answer in words, and what `report.json` holds of the search."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from dtypedoctor.diagnosis.rule import Severity
from dtypedoctor.examination.results import Outcome
from dtypedoctor.lab.bisect.results import Answer, Bisection, End, Kind, Symptom, Verdict
from dtypedoctor.lab.bisect.symptoms import part_in_words
from dtypedoctor.report.build import build_report
from dtypedoctor.report.to_json import Report, Status
from dtypedoctor.text import counted, number

_MOST_NAMED = 5
_NEAR_THE_END = 0.5
"""Share of a dtype's max above which a healthy run says so: a factor of two is little for activations."""


def answer(found: Bisection) -> str:
    """The answer for a person."""
    note, name = found.note, "domain-error: it" if found.failure.kind is Kind.NOT_FINITE else "It"
    match found.end:
        case End.FOUND:
            return _found(found)
        case End.HEALTHY:
            return _healthy(found)
        case End.DOMAIN_ERROR:
            return f"{name} fails in float32 too, so precision is not the cause ({note})."
        case End.ROUNDED_WEIGHTS:
            return (
                f"Rounding the weights breaks the model: with the rounded weights it fails even in float32 ({note}), with the original "
                "ones it does not. Keeping modules in float32 cannot restore them; load these weights in a wider dtype."
            )
        case End.OUTSIDE:
            return (
                f"The cause is outside the modules: it fails even with all {counted(found.candidates, 'module')} in float32 ({note}), "
                "but not in the float32 reference. Check the dtypes of the inputs, the loss and the code between modules."
            )
        case End.UNRESOLVED:
            return f"Unresolved, no module can be named: {note}."
        case End.INTERRUPTED:
            return _interrupted(found)


def _found(found: Bisection) -> str:
    if not found.confirmed:
        reason = found.trials[0].reason if found.trials else "that was not tried"
        return f"Keeping {_kept(found)} in float32 fixes {found.workload}, but not the whole run: {reason}."
    story = f"Smallest fix: keep {_kept(found)} in float32. Without it: {found.failure.reason}."
    result = found.modules.result if found.modules is not None else None
    flaky = " The failure is flaky: repeated runs differ, so this may be chance. Bisect again to confirm it."
    return f"{story}{_by_corrections(found)}{flaky if result is not None and result.flaky else ''}"


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
    accepted = f" ({found.tolerance:.3g} accepted)" if found.tolerance is not None else ""
    told = f"No failure: everything is finite, no dtype error, and within rounding of float32{accepted}.{_near_the_end(found.failure)}"
    others = [finding.id for finding in found.treatment.findings if finding.severity is not Severity.INFO]
    notes = [finding.id for finding in found.treatment.findings if finding.severity is Severity.INFO]
    if others:
        told += f" Bisection cannot search for what else is found: {', '.join(others)}; `dtypedoctor run` tries fixes for it."
    return f"{told} Notes: {', '.join(notes)}." if notes else told


def _near_the_end(healthy: Symptom) -> str:
    """Name what is close to overflow: other tokens may exceed the max."""
    if healthy.share is None or healthy.share < _NEAR_THE_END or healthy.absmax is None or healthy.fqn is None:
        return ""
    return f" {part_in_words(healthy.fqn)} reaches {number(healthy.absmax)}, {healthy.share:.0%} of its dtype's max."


def _interrupted(found: Bisection) -> str:
    if not found.culprits:
        return f"Interrupted before a result{': ' + found.note if found.note else ''}."
    minimal = found.modules is not None and found.modules.result is not None
    known = "" if minimal else f" Some of these {counted(len(found.culprits), 'module')} may not be needed."
    return f"Interrupted. Keeping {_kept(found)} in float32 fixes {found.workload}.{known}"


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
