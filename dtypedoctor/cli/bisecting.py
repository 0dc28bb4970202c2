"""What ``bisect`` does once its arguments are read. It is imported only then: ``--help`` must not wait for it."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dtypedoctor.analysis import ending_of
from dtypedoctor.cli.live import IMPORTS, LiveView
from dtypedoctor.cli.output import kept
from dtypedoctor.cli.scenario_files import allow_directory, load_checked, require_at_hand, resume_command, why_no_cuda
from dtypedoctor.diagnosis.checkpoint import cached
from dtypedoctor.errors import UsageError
from dtypedoctor.interruptions import say
from dtypedoctor.plugins import Model, registered
from dtypedoctor.redaction.redact import without_process_secrets
from dtypedoctor.report.bisection import bisection_report
from dtypedoctor.report.build import REPORT_JSON, REPORT_MD
from dtypedoctor.report.model import Report
from dtypedoctor.runner.directories import clear, new_directory, remove_unused
from dtypedoctor.runner.launch import Launcher, WarmServer, may_share_process
from dtypedoctor.runner.process import ending_by_interrupt
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.loading import BUILTIN, case_of, override, resolve
from dtypedoctor.scenario.model import Request, Scenario
from dtypedoctor.trials.bisection.bisect import Progress, bisect
from dtypedoctor.trials.bisection.probe_runner import JOURNAL, Apart, Asked, Journal, ProbeRunner
from dtypedoctor.trials.bisection.questions import Measured
from dtypedoctor.trials.bisection.results import Bisection, End

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
        raise UsageError(
            "--resume continues with the original options", "Pass it alone, or with --jobs and --allow-code."
        )
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


_ONE_PROCESS = (
    "--jobs {jobs} has no effect: the process that has loaded the model makes one probe after the other; "
    "with --fresh-workers {jobs} processes run at a time, each with a model of its own"
)
MOST_JOBS = 4
"""Runs at a time where nobody says: each holds a model of its own."""


def bisect_case(case: Case, jobs: int | None, *, resident: bool | None = None) -> Report:
    """Bisects ``case``, ``jobs`` probes at a time, and leaves the report in its directory; ``resident`` as in :class:`WarmServer`, for scenarios of one process.

    Raises:
        UsageError: it cannot be run at all; a new directory is not left behind.
        WorkerDiedError: the worker died before there was a model.
    """
    with (
        _kept_only_if_used(case),
        ending_by_interrupt(),
        LiveView(sys.stderr) as view,
        _probe_runner(case, jobs, view, resident=resident) as runner,
    ):
        journal = Journal(case.directory)

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
def _probe_runner(case: Case, jobs: int | None, view: LiveView, *, resident: bool | None) -> Iterator[ProbeRunner]:
    """Runs requests where the models are built already: in forks of a server, or on a GPU in the server itself, one after the other.

    Workers that build their models themselves get a GPU each.
    """
    gpus = _visible_gpus()
    with _server(case, view, resident=resident) as warm:
        on_gpu = (
            not why_no_cuda() if resident is False else warm.device == "cuda"
        ) and case.asked.scenario.device != "cpu"
        if any(step.model is not None and step.model.device_map for step in case.asked.scenario.steps):
            gpus = gpus[:1]  # each run takes all of them
        width = jobs or (max(1, len(gpus)) if on_gpu else min(len(os.sched_getaffinity(0)), MOST_JOBS))
        if warm.runs_in_place:
            if (jobs or 1) > 1:
                view.say(_ONE_PROCESS.format(jobs=jobs))
            width = 1
        yield ProbeRunner(
            case.directory,
            lambda request, place, slot: warm.start(request, place, _gpu_environment(slot, gpus) if on_gpu else {}),
            width,
            note=_noting(Journal(case.directory)),
            apart=Apart(needs=lambda request: not may_share_process(request.scenario), room=warm.room),
        )


@contextmanager
def _server(case: Case, view: LiveView, *, resident: bool | None) -> Iterator[WarmServer]:
    """A server that has imported what runs need and built the scenario's models, if it can."""
    place = case.directory / "server"
    clear(place)  # that of an interrupted bisection
    view.begin(IMPORTS)
    request = Request(scenario=case.asked.scenario)
    with (
        Launcher(case.directory / "server.log") as launcher,
        _ready(launcher, view),
        WarmServer(launcher, request, place, resident=resident, say=view.say) as warm,
    ):
        yield warm


def _noting(journal: Journal) -> Callable[[str, Run | UsageError], None]:
    def note(place: str, run: Run | UsageError) -> None:
        journal.note("run", place=place, ended=run.message if isinstance(run, UsageError) else ending_of(run).words)

    return note


@contextmanager
def _ready(launcher: Launcher, view: LiveView) -> Iterator[None]:
    launcher.wait_for_imports()
    view.begin("building the model")
    yield


def _reported(found: Bisection, directory: Path) -> Report:
    files = {"report": REPORT_JSON, "markdown": REPORT_MD, "before": "before", "journal": JOURNAL}
    if (directory / "server.log").exists():
        files["log"] = "server.log"
    if found.reproduction is not None and found.reproduction.script is not None:
        files["reproduction"] = found.reproduction.script
    report = bisection_report(
        found,
        command=shlex.join(without_process_secrets(["dtypedoctor", *sys.argv[1:]])),
        files=files,
        next_command=_next_command(found, directory),
    )
    return kept(directory, report)


def _next_command(found: Bisection, directory: Path) -> str:
    if found.end is End.INTERRUPTED:
        return resume_command(directory)
    return f"dtypedoctor report {shlex.quote(str(directory))} --format md"


_DRIVER = Path("/proc/driver/nvidia/gpus")
_VARIABLE = "CUDA_VISIBLE_DEVICES"


def _visible_gpus() -> tuple[str, ...]:
    """What ``CUDA_VISIBLE_DEVICES`` names, else the numbers of all GPUs that the driver knows."""
    named = os.environ.get(_VARIABLE)
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip())
    try:
        return tuple(str(number) for number, _ in enumerate(_DRIVER.iterdir()))
    except OSError:
        return ()


def _gpu_environment(slot: int, gpus: tuple[str, ...]) -> dict[str, str]:
    """The variables by which a worker gets one GPU for itself; none where there is nothing to share out."""
    return {_VARIABLE: gpus[slot % len(gpus)]} if len(gpus) > 1 else {}
