"""What ``run`` and ``exec`` do once their arguments are read. It is imported only then: ``--help`` must not wait for it.

Of several scenarios each gets a directory of its own, and all of them one matrix.
"""

import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path

from dtypedoctor.analysis import ending_of
from dtypedoctor.cli.at_hand import require_at_hand
from dtypedoctor.cli.live import IMPORTS, LiveView
from dtypedoctor.cli.output import kept
from dtypedoctor.cli.pace import Pace
from dtypedoctor.cli.rerunning import Reruns
from dtypedoctor.cli.scenario_files import load_checked
from dtypedoctor.diagnosis.rule import Severity
from dtypedoctor.errors import DoctorError, ExitCode, UsageError
from dtypedoctor.redaction.redact import redact, without_process_secrets
from dtypedoctor.replay.capsule import Capsule
from dtypedoctor.report.build import REPORT_JSON, REPORT_MD, build_report
from dtypedoctor.report.files import MATRIX_JSON
from dtypedoctor.report.matrix import MatrixRow, in_one_line, refused_report, refused_row, render_matrix_json, row_of
from dtypedoctor.report.model import Report, Status
from dtypedoctor.runner.directories import new_directory, remove_unused
from dtypedoctor.runner.launch import PRELOAD, WORKER, Launcher
from dtypedoctor.runner.process import outliving, run_ranks, run_script
from dtypedoctor.runner.run import STDERR, Run
from dtypedoctor.scenario.loading import resolve
from dtypedoctor.scenario.model import Request, Scenario, Script
from dtypedoctor.trials.results import Outcome, Treatment
from dtypedoctor.trials.treatment import Plan, treat

ENDINGS: tuple[tuple[str, Callable[[Report], bool], ExitCode], ...] = (
    ("no usable trace, and no finding without one", lambda r: not (r.trace_usable or r.findings), ExitCode.NO_TRACE),
    ("fails and is fixed as the scenario says", lambda r: r.expectation_met is True, ExitCode.OK),
    ("not what the scenario says", lambda r: r.expectation_met is False, ExitCode.FINDINGS),
    ("a bisection of what fails", lambda r: r.bisection is not None and r.bisection["end"] != "healthy", ExitCode.FINDINGS),
    ("a finding that is more than a note", lambda r: any(f.severity is not Severity.INFO for f in r.findings), ExitCode.FINDINGS),
    ("killed, stopped, raised, status not 0, not measured", lambda r: r.status is not Status.HEALTHY, ExitCode.FINDINGS),
    ("differs without instrumentation", lambda r: r.observer.bitwise_equal is False, ExitCode.FINDINGS),
    ("nothing wrong", lambda r: True, ExitCode.OK),
)  # fmt: skip
"""How a run ends, in the order in which it is decided, and the exit code of the command."""


def exit_code(report: Report) -> int:
    """The exit code that a finished report stands for: that of the first line of :data:`ENDINGS` that holds."""
    return int(next(code for _, holds, code in ENDINGS if holds(report)))


Start = Callable[[Request, Path], Run]
"""Runs a request in a directory that does not exist yet."""


def treat_scenario(
    scenario: Scenario,
    directory: Path,
    plan: Plan,
    view: LiveView | None = None,
    preload: Sequence[str] | None = None,
    wheels: Path | None = None,
) -> Report:
    """Treats a scenario in ``directory``, which is new, and leaves its report there.

    Progress goes to ``view``, which shows it on stderr if left out. ``preload`` names the modules that its workers are forked with, beside
    those that every worker needs; if left out, all that a scenario may need. What the scenario requires is taken from ``wheels``, if given.

    Raises:
        UsageError: the scenario cannot be run, or the directory cannot be used. It is gone then, unless something else lies in it.
    """
    in_matrix = view is not None
    view = view or LiveView(sys.stderr)
    with _removed_if_refused(directory):
        require_at_hand(scenario)
    pace = Pace(directory, "run" if plan.remedies else "diagnose", scenario, in_matrix=in_matrix)
    with (
        _removed_if_refused(directory),
        _with_releases(scenario, wheels),
        view,
        _kept(pace, view),
        _starter(scenario, directory, view, preload) as start,
    ):

        def launch(label: str, request: Request) -> Run:
            view.begin(label)
            finished = start(request, directory / label)
            view.end(ending_of(finished).words)
            return finished

        return _reported(treat(scenario, launch, plan), directory)


def treat_script(scenario: Scenario, directory: Path, plan: Plan, *, in_place: bool = False) -> tuple[Report, int]:
    """Treats a user's script in ``directory``, which is new; the script has this process's streams the first time it runs.

    Args:
        scenario: what to run.
        directory: where everything that is found out is kept.
        plan: how far to go.
        in_place: whether another run may change files of the working directory; else it gets a copy-on-write view of it.

    Returns:
        The report, and the script's own exit status as a shell would give it.

    Raises:
        UsageError: there is no such script, the directory cannot be used, or another run cannot have a view of the working
            directory. The directory is gone then, unless something else lies in it.
    """
    run = run_script if scenario.distributed is None else run_ranks
    with _removed_if_refused(directory), outliving(), ExitStack() as resources:
        reruns = resources.enter_context(Reruns(directory, in_place=in_place)) if plan.runs_again else None

        def launch(label: str, request: Request) -> Run:
            if reruns is None:
                return run(request, directory / label, live=label == "before")
            if label == "before":
                first = run(request, directory / label, live=True)
                reruns.first_is_over()
                return first
            with reruns.begin(label) as through:
                return run(request, directory / label, live=False, through=through)

        treatment = treat(scenario, launch, plan)
        code = treatment.before.exit.code
        return _reported(treatment, directory), code if code >= 0 else 128 - code


@contextmanager
def _with_releases(scenario: Scenario, wheels: Path | None) -> Iterator[None]:
    """Lets the processes of a scenario import the releases that it requires, from ``wheels`` or from where they are installed.

    Raises:
        UsageError: a release is not there.
    """
    folders: list[str] = []
    for wanted in scenario.requires:
        name, _, version = wanted.partition("==")
        if not version or "/" in wanted:
            raise UsageError(f"{scenario.name}: requires: {wanted!r} is no release", "Write NAME==VERSION.")
        folder = (wheels or Path("wheels")) / f"{name}-{version}"
        if wheels is not None and folder.is_dir():
            folders.append(str(folder.resolve()))
        elif _installed(name) != version:
            where = f"neither installed nor in {wheels}" if wheels is not None else "not installed"
            given = "" if wheels is not None else f", then pass --wheels {folder.parent}"
            raise UsageError(
                f"{scenario.name} requires {wanted}, which is {where}",
                f"pip install --no-deps --target {folder} {wanted}{given}",
            )
    before = os.environ.get("PYTHONPATH")
    if folders:
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([before] if before else [])])
    try:
        yield
    finally:
        if folders and before is None:
            del os.environ["PYTHONPATH"]
        elif folders:
            os.environ["PYTHONPATH"] = str(before)


def _installed(name: str) -> str | None:
    """The version of an installed distribution, without importing it; None where it is not there."""
    try:
        return version_of(name)
    except PackageNotFoundError:
        return None


@contextmanager
def _removed_if_refused(directory: Path) -> Iterator[None]:
    """Takes the run directory away again where nothing could be run in it."""
    try:
        yield
    except UsageError:
        remove_unused(directory)
        raise


@contextmanager
def _kept(pace: Pace, view: LiveView) -> Iterator[None]:
    """Inside, ``view`` keeps ``pace``; how long each part took is written down if the run comes to its end."""
    view.keep_pace(pace)
    yield
    pace.keep()


@contextmanager
def _starter(scenario: Scenario, directory: Path, view: LiveView, preload: Sequence[str] | None) -> Iterator[Start]:
    """What runs a scenario: torchrun for several processes, a fresh interpreter for a script, else a warm server."""
    if scenario.distributed is not None:
        yield lambda request, place: run_ranks(request, place, live=False, progress=view.progress)
    elif isinstance(scenario.steps[0].workload, Script):
        yield lambda request, place: run_script(request, place, live=False)
    else:
        imported = (PRELOAD,) if preload is None else (WORKER, *preload)
        with Launcher(directory / "server.log", progress=view.progress, preload=imported) as launcher:
            if launcher.is_importing:
                view.begin(IMPORTS)
                launcher.wait_for_imports()
                view.end("")
            yield launcher.run


def _reported(treatment: Treatment, directory: Path) -> Report:
    files = {"report": REPORT_JSON, "markdown": REPORT_MD, "before": "before"}
    if (directory / "before" / STDERR).exists():
        files["raw_output"] = f"before/{STDERR}"
    if (directory / "server.log").exists():
        files["log"] = "server.log"
    report = build_report(
        treatment,
        command=shlex.join(without_process_secrets(["dtypedoctor", *sys.argv[1:]])),
        files=files,
        next_command=_next_command(treatment, directory),
    )
    return kept(directory, report)


def _next_command(treatment: Treatment, directory: Path) -> str:
    """What tries fixes on the failing call where it was kept and no fix of the run is known; else what prints the report."""
    capsule = treatment.capsule
    if not isinstance(capsule, Capsule) or any(trial.outcome is Outcome.FIXED for trial in treatment.trials):
        return f"dtypedoctor report {shlex.quote(str(directory))} --format md"
    option = " --allow-code" if any(capsule.code()) else ""
    return f"dtypedoctor replay {shlex.quote(str(capsule.directory))}{option}"


_GRAVEST_FIRST = (ExitCode.INTERNAL, ExitCode.USAGE, ExitCode.NO_TRACE, ExitCode.FINDINGS)


def load_all(texts: Sequence[str], *, allow_code: bool) -> list[Scenario]:
    """The scenarios that a person names, in that order; those of a folder by name, each file once.

    Raises:
        UsageError: something cannot be read, a folder holds none, two files have the same name, or a scenario from elsewhere
            names code and ``allow_code`` is not set.
    """
    paths = {path.resolve(): path for text in texts for path in _paths(text)}
    loaded = [load_checked(path, allow_code=allow_code) for path in paths.values()]
    twice = [name for name, times in Counter(scenario.name for scenario in loaded).items() if times > 1]
    if twice:
        raise UsageError(
            f"{', '.join(twice)}: two files of this name", "Rename one: each scenario gets a directory of its name."
        )
    return loaded


def _paths(text: str) -> list[Path]:
    folder = Path(text)
    if not folder.is_dir():
        return [resolve(text)]
    found = sorted(folder.glob("*.yaml"))
    if not found:
        raise UsageError(f"{text}: no scenarios here", "A scenario is a file that ends in .yaml.")
    return found


def treat_all(
    scenarios: Sequence[Scenario], directory: Path, plan: Plan, wheels: Path | None = None
) -> tuple[list[MatrixRow], list[Report]]:
    """Treats each scenario in a folder of its name in ``directory``, which is new, and leaves the matrix there.

    A scenario that cannot be run at all is a row of the matrix like any other; the rest is run all the same.

    Returns:
        The rows, and the reports in the same order.
    """
    rows: list[MatrixRow] = []
    reports: list[Report] = []
    for scenario in scenarios:
        view = LiveView(sys.stderr, every_run=False)
        row, report = _treated(scenario, directory, plan, view, wheels)
        rows.append(row)
        reports.append(report)
        view.say(f"{len(rows)}/{len(scenarios)} {in_one_line(rows[-1])}")
    try:
        (directory / MATRIX_JSON).write_text(render_matrix_json(rows, exit_code=matrix_exit(rows)), encoding="utf-8")
        print(f"Matrix: {directory / MATRIX_JSON}", file=sys.stderr)
    except OSError as error:  # the disk is full, or the directory is gone: it can still be shown
        print(f"dtypedoctor: cannot write the matrix to {directory}: {error.strerror}", file=sys.stderr)
    return rows, reports


def _treated(
    scenario: Scenario, directory: Path, plan: Plan, view: LiveView, wheels: Path | None
) -> tuple[MatrixRow, Report]:
    began = time.monotonic()
    try:
        report = treat_scenario(
            scenario, new_directory(directory / scenario.name, scenario.name), plan, view, wheels=wheels
        )
    except DoctorError as refused:
        row = refused_row(scenario.name, refused.message, exit_code=int(refused.exit_code))
        return row, refused_report(scenario.name, refused.message)
    seconds = round(time.monotonic() - began, 2)
    path = f"{scenario.name}/{REPORT_JSON}"
    return row_of(redact(report), exit_code=exit_code(report), seconds=seconds, path=path), report


def matrix_exit(rows: Sequence[MatrixRow]) -> int:
    """0 if each scenario's exit code is 0; else the code of the gravest: usage, then a dead worker, then findings."""
    codes = {row.exit for row in rows}
    return next((int(code) for code in _GRAVEST_FIRST if int(code) in codes), int(ExitCode.OK))
