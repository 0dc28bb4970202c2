"""What ``bisect`` does once its arguments are read. It is imported only then: ``--help`` must not wait for it."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dtypedoctor.cli.reported import kept
from dtypedoctor.diagnosis.checkpoint import cached
from dtypedoctor.errors import UsageError
from dtypedoctor.interruptions import say
from dtypedoctor.lab.bisect.bisect import Progress, bisect
from dtypedoctor.lab.bisect.probe_runner import JOURNAL, Asked, Journal, ProbeRunner
from dtypedoctor.lab.bisect.questions import Measured
from dtypedoctor.lab.bisect.report import bisection_report
from dtypedoctor.lab.bisect.results import Bisection, End
from dtypedoctor.lab.cli.live import IMPORTS, LiveView
from dtypedoctor.lab.cli.scenario_files import allow_directory, load_checked, require_at_hand, resume_command
from dtypedoctor.lab.runner.launch import Launcher, Resident
from dtypedoctor.lab.scenarios.loading import case_of, override, resolve
from dtypedoctor.lab.scenarios.model import Scenario
from dtypedoctor.plugins import BUILTIN, Model, registered
from dtypedoctor.redaction.redact import without_process_secrets
from dtypedoctor.report.build import REPORT_JSON, REPORT_MD
from dtypedoctor.report.to_json import Report
from dtypedoctor.runner.directories import clear, new_directory, remove_unused
from dtypedoctor.runner.process import ending_by_interrupt

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
        _require_weights(options.model)
        return case_of(options.model, options.dtype or DTYPE, options.workload)
    if options.workload is not None:
        raise UsageError("--workload needs --model: a scenario has a workload already", "Drop one of the two.")
    assert options.scenario is not None  # one of the two is given
    loaded = load_checked(resolve(options.scenario), allow_code=options.allow_code)
    if loaded.distributed is not None:
        raise UsageError(
            f"{loaded.name}: a bisection runs in one process, and this scenario has {loaded.distributed.processes}",
            "Take `distributed` out of it; --device-map auto spreads over all GPUs what one does not hold.",
        )
    return override(loaded, dtype=options.dtype)


def _require_weights(model: str) -> None:
    """A hub id has to be in the cache: each of many runs loads the model anew, and none of them should wait for a network.

    Raises:
        UsageError: it is not.
    """
    if ":" not in model and not os.path.exists(model) and cached(model) is None:
        meant = f"; did you mean '{BUILTIN}{model}'?" if model in registered(Model) else ""
        raise UsageError(
            f"--model: {model} is neither a directory nor a model in the Hugging Face cache{meant}",
            "Use builtin:NAME, a directory, a downloaded hub id, or package.module:factory.",
        )


def bisect_case(case: Case) -> Report:
    """Bisects ``case``, and leaves the report in its directory.

    Raises:
        UsageError: it cannot be run at all; a new directory is not left behind.
        WorkerDiedError: the worker died before there was a model.
    """
    journal = Journal(case.directory)
    with (
        _kept_only_if_used(case),
        ending_by_interrupt(),
        LiveView(sys.stderr) as view,
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
def _resident(case: Case, view: LiveView) -> Iterator[Resident]:
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
