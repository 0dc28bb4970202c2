"""What ``bisect`` does once its arguments are read, and the report that it makes. It is imported only then: ``--help`` must not wait for it."""

import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from dtypedoctor.cli.reported import kept
from dtypedoctor.diagnosis.checkpoint import cached
from dtypedoctor.diagnosis.rule import Severity
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.results import Outcome
from dtypedoctor.interruptions import say
from dtypedoctor.lab.bisect.bisect import Progress, bisect
from dtypedoctor.lab.bisect.measurements import JOURNAL, Asked, Journal, ProbeRunner
from dtypedoctor.lab.bisect.questions import Measured
from dtypedoctor.lab.bisect.results import Answer, Bisection, End, Kind, Symptom, Verdict
from dtypedoctor.lab.bisect.symptoms import part_in_words
from dtypedoctor.lab.cli.running import IMPORTS, ProgressLines
from dtypedoctor.lab.cli.scenario_files import allow_directory, load_checked, require_at_hand, resume_command
from dtypedoctor.lab.runner.launch import Launcher, Resident
from dtypedoctor.lab.scenarios.loading import case_of, override, resolve
from dtypedoctor.lab.scenarios.model import Scenario
from dtypedoctor.plugins import BUILTIN, Model, registered
from dtypedoctor.redaction.redact import without_process_secrets
from dtypedoctor.report.build import REPORT_JSON, REPORT_MD, build_report
from dtypedoctor.report.to_json import Report, Status
from dtypedoctor.runner.directories import clear, new_directory, remove_unused
from dtypedoctor.runner.process import ending_by_interrupt
from dtypedoctor.text import counted, number

DTYPE = "float16"
"""The dtype under suspicion where neither a scenario nor an option names one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says about the case; None where it says nothing."""

    scenario: str | None = None
    model: str | None = None
    dtype: str | None = None
    workload: str | None = None
    device: str | None = None
    device_map: str | None = None
    out: Path | None = None
    tolerance: float | None = None
    time_limit: int | None = None
    allow_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A bisection to do.

    Attributes:
        directory: its run directory, which exists.
        resumed: whether something lies there already.
    """

    asked: Asked
    directory: Path
    resumed: bool


def new_case(options: Options) -> Case:
    """A case in a new run directory.

    Raises:
        UsageError: the options contradict each other, the scenario cannot be read, or the directory cannot be made.
    """
    scenario = override(_scenario(options), device=options.device, device_map=options.device_map)
    if options.time_limit is not None:
        scenario = scenario.with_changes(time_limit=options.time_limit)
    if options.tolerance is not None and not 0 < options.tolerance < float("inf"):
        raise UsageError("--tolerance must be a number above 0", "It is a difference of log-probabilities, e.g. 0.05.")
    require_at_hand(scenario)
    asked = Asked(scenario=scenario, tolerance=options.tolerance)
    directory = new_directory(options.out, f"bisect-{scenario.name}")
    Journal(directory).begin(asked)
    return Case(asked=asked, directory=directory, resumed=False)


def resumed_case(directory: Path, beside: Options) -> Case:
    """The case whose run directory this is.

    Raises:
        UsageError: another option wants something else, there is no bisection in the directory, or it is from elsewhere and
            may not run code.
    """
    if replace(beside, allow_code=False) != Options():
        raise UsageError("--resume continues with the original options", "Pass it alone, or with --allow-code.")
    asked = Journal(directory).asked()
    allow_directory(directory, allowed=beside.allow_code)
    return Case(asked=asked, directory=directory, resumed=True)


def _scenario(options: Options) -> Scenario:
    if (options.scenario is None) == (options.model is None):
        raise UsageError(
            "pass either SCENARIO or --model", "For example: dtypedoctor bisect --model builtin:gemma4-tiny"
        )
    if options.model is not None:
        # a hub id has to be in the cache: each of many runs loads the model anew, and none of them should wait for a network
        model = options.model
        if ":" not in model and not os.path.exists(model) and cached(model) is None:
            meant = f"; did you mean '{BUILTIN}{model}'?" if model in registered(Model) else ""
            raise UsageError(
                f"--model: {model} is neither a directory nor a model in the Hugging Face cache{meant}",
                "Use builtin:NAME, a directory, a downloaded hub id, or package.module:factory.",
            )
        return case_of(options.model, options.dtype or DTYPE, options.workload)
    if options.workload is not None:
        raise UsageError("--workload needs --model: a scenario has a workload already", "Drop one of the two.")
    assert options.scenario is not None  # one of the two is given
    loaded = load_checked(resolve(options.scenario), allow_code=options.allow_code)
    return override(loaded, dtype=options.dtype)


def bisect_case(case: Case) -> Report:
    """Bisects ``case``, and leaves the report in its directory.

    Raises:
        UsageError: it cannot be run at all; a new directory is not left behind.
        WorkerDiedError: the worker died before there was a model.
    """
    journal = Journal(case.directory)
    view = ProgressLines(sys.stderr)
    with (
        _kept_only_if_used(case),
        ending_by_interrupt(),
        _resident(case, view) as resident,
    ):

        def probe(measured: Measured) -> None:
            view.probe(measured)
            if not measured.repeated and not measured.probe.cached:
                journal.note(
                    "probe",
                    question=measured.question,
                    stage=measured.probe.stage,
                    treated=list(measured.names),
                    outcome=measured.probe.outcome,
                    reason=measured.symptom.reason,
                    absmax=measured.symptom.absmax,
                    seconds=round(measured.symptom.seconds, 3),
                )

        runner = ProbeRunner(case.directory, resident.run, journal)
        progress = Progress(stage=view.begin, probe=probe)
        found = bisect(case.asked.scenario, runner, progress, case.asked.tolerance)
    return _reported(found, case.directory)


@contextmanager
def _kept_only_if_used(case: Case) -> Iterator[None]:
    try:
        yield
    except UsageError:
        if not case.resumed:
            remove_unused(case.directory)
        raise
    except (KeyboardInterrupt, OSError):
        say(f"Resume with: {resume_command(case.directory)}")
        raise


@contextmanager
def _resident(case: Case, view: ProgressLines) -> Iterator[Resident]:
    """A process that has imported what runs need, and in which the model stays loaded."""
    for place in case.directory.glob("server*"):
        clear(place)  # that of an interrupted bisection
    view.begin(IMPORTS)
    with Launcher(case.directory / "server.log") as launcher:
        launcher.wait_for_imports()
        with Resident(launcher, case.asked.scenario, case.directory / "server", view.say) as resident:
            yield resident


def _reported(found: Bisection, directory: Path) -> Report:
    files = {"report": REPORT_JSON, "markdown": REPORT_MD, "before": "before", "journal": JOURNAL}
    if (directory / "server.log").exists():
        files["log"] = "server.log"
    if found.reproduction is not None and found.reproduction.script is not None:
        files["reproduction"] = found.reproduction.script
    following = f"dtypedoctor report {shlex.quote(str(directory))} --format md"
    if found.end is End.INTERRUPTED:
        following = resume_command(directory)
    report = bisection_report(
        found,
        command=shlex.join(without_process_secrets(["dtypedoctor", *sys.argv[1:]])),
        files=files,
        next_command=following,
    )
    return kept(directory, report)


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
            if not found.culprits:
                return f"Interrupted before a result{': ' + found.note if found.note else ''}."
            minimal = found.modules is not None and found.modules.result is not None
            known = "" if minimal else f" Some of these {counted(len(found.culprits), 'module')} may not be needed."
            return f"Interrupted. Keeping {_kept(found)} in float32 fixes {found.workload}.{known}"


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
        "failure": {
            "kind": found.failure.kind.value,
            **_fields(found.failure, "reason", "phase", "step", "fqn", "absmax"),
        },
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


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "mode": verdict.mode,
        "workload": verdict.workload,
        "outcome": verdict.outcome.value,
        **_fields(verdict.symptom, "phase", "step", "fqn", "absmax", "reason", "seconds"),
    }


def _fields(symptom: Symptom, *names: str) -> dict[str, Any]:
    return {name: getattr(symptom, name) for name in names}


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
