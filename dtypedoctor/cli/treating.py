"""What ``run`` and ``exec`` do once their arguments are read. It is imported only then: ``--help`` must not wait for it."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dtypedoctor.analysis import ending_of
from dtypedoctor.cli.live import LiveView
from dtypedoctor.errors import UsageError
from dtypedoctor.redaction.redact import without_process_secrets
from dtypedoctor.report.build import build_report
from dtypedoctor.report.files import REPORT_JSON, REPORT_MD, write_report
from dtypedoctor.report.model import Report
from dtypedoctor.runner.directories import remove_unused
from dtypedoctor.runner.launch import Launcher
from dtypedoctor.runner.process import outliving
from dtypedoctor.runner.run import STDERR, Run
from dtypedoctor.runner.script import run_ranks, run_script
from dtypedoctor.scenario.model import Scenario, Script
from dtypedoctor.scenario.request import Request
from dtypedoctor.trials.treatment import Plan, Treatment, treat

Start = Callable[[Request, Path], Run]
"""Runs a request in a directory that does not exist yet."""


def treat_scenario(scenario: Scenario, directory: Path, plan: Plan, view: LiveView | None = None) -> Report:
    """Treats a scenario in ``directory``, which is new, and leaves its report there.

    Progress goes to ``view``, which shows it on stderr if left out.

    Raises:
        UsageError: the scenario cannot be run, or the directory cannot be used. It is gone then, unless something else lies in it.
    """
    view = view or LiveView(sys.stderr)
    with _removed_if_refused(directory), view, _starter(scenario, directory, view) as start:

        def launch(label: str, request: Request) -> Run:
            view.begin(label)
            finished = start(request, directory / label)
            view.end(ending_of(finished).words)
            return finished

        return _reported(treat(scenario, launch, plan), directory)


def treat_script(scenario: Scenario, directory: Path, plan: Plan) -> tuple[Report, int]:
    """Treats a user's script in ``directory``, which is new; the script has this process's streams the first time it runs.

    Returns:
        The report, and the script's own exit status as a shell would give it.

    Raises:
        UsageError: there is no such script, or the directory cannot be used. It is gone then, unless something else lies in it.
    """
    with _removed_if_refused(directory), outliving():

        def launch(label: str, request: Request) -> Run:
            first = label == "before"
            if not first:
                print(f"dtypedoctor: running the script again ({label}) …", file=sys.stderr, flush=True)
            start = run_script if scenario.distributed is None else run_ranks
            return start(request, directory / label, live=first)

        treatment = treat(scenario, launch, plan)
        code = treatment.before.exit.code
        return _reported(treatment, directory), code if code >= 0 else 128 - code


@contextmanager
def _removed_if_refused(directory: Path) -> Iterator[None]:
    """Takes the run directory away again where nothing could be run in it."""
    try:
        yield
    except UsageError:
        remove_unused(directory)
        raise


@contextmanager
def _starter(scenario: Scenario, directory: Path, view: LiveView) -> Iterator[Start]:
    """What runs a scenario: torchrun for several processes, a fresh interpreter for a script, else a warm server."""
    if scenario.distributed is not None:
        yield lambda request, place: run_ranks(request, place, live=False, progress=view.progress)
    elif isinstance(scenario.steps[0].workload, Script):
        yield lambda request, place: run_script(request, place, live=False)
    else:
        with Launcher(directory / "server.log", progress=view.progress) as launcher:
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
        next_command=f"dtypedoctor report {shlex.quote(str(directory))} --format md",
    )
    return kept(directory, report)


def kept(directory: Path, report: Report) -> Report:
    """Writes ``report`` into ``directory``, or says on stderr why that cannot be done."""
    try:
        write_report(directory, report)
    except OSError as error:  # the disk is full, or the directory is gone: it can still be shown
        print(f"dtypedoctor: the report cannot be kept in {directory}: {error.strerror}", file=sys.stderr)
    return report
