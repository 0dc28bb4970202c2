"""Makes the Report of a bisection."""

from dataclasses import asdict, replace
from statistics import median
from typing import Any

from dtypedoctor.report.bisection_answer import answer
from dtypedoctor.report.build import build_report
from dtypedoctor.report.model import Report, Status
from dtypedoctor.trials.bisection.questions import Answer
from dtypedoctor.trials.bisection.results import Bisection
from dtypedoctor.trials.bisection.symptoms import Symptom
from dtypedoctor.trials.bisection.verdicts import Verdict
from dtypedoctor.trials.results import Outcome

__all__ = ["bisection_report", "bisection_section"]


def bisection_report(found: Bisection, *, command: str, files: dict[str, str], next_command: str) -> Report:
    """Everything that is said about a bisection: the report of its untreated run, with the answers.

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
        f"with {len(one.treated) or 'nothing'} treated: {', then '.join(one.outcomes)}"
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
