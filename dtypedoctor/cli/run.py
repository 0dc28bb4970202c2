"""``dtypedoctor run``: a scenario from failure to proven cure."""

import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dtypedoctor.cli.console import console_for
from dtypedoctor.cli.live import LiveView
from dtypedoctor.diagnosis.finding import Severity
from dtypedoctor.errors import ExitCode, UsageError
from dtypedoctor.report.build import build_report
from dtypedoctor.report.files import REPORT_JSON, REPORT_MD, write_report
from dtypedoctor.report.model import Report, Status
from dtypedoctor.report.terminal import render_terminal
from dtypedoctor.runner.launch import Launcher, Run, make_directory
from dtypedoctor.scenario.catalog import resolve
from dtypedoctor.scenario.loading import load_scenario
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.scenario.overrides import override
from dtypedoctor.scenario.request import Request
from dtypedoctor.trials.summary import how_it_ended
from dtypedoctor.trials.treatment import Plan, treat


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="run", epilog="Example:  dtypedoctor run scenarios/gemma4_grpo_fp16.yaml --out runs/first")(run)


def run(
    scenario: Annotated[str, typer.Argument(help="Scenario file, or the name of one that comes with the program.")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory to create.", show_default="runs/NAME-TIME")
    ] = None,
    no_remedies: Annotated[bool, typer.Option("--no-remedies", help="Stop after the diagnosis.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="Another model: builtin:NAME, a folder or a hub id.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Another dtype for every model.")] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Another seed.")] = None,
) -> int:
    """Run a scenario: before, diagnosis, every proposed remedy, and the reference.

    Exits 0 if nothing is wrong, or if the scenario failed and was cured as it says; 10 if findings remain; 3 if the
    worker left no usable trace.
    """
    loaded = override(load_scenario(resolve(scenario)), model=model, dtype=dtype, device=device, seed=seed)
    directory = out if out is not None else default_directory(loaded.name)
    report = run_scenario(loaded, directory, remedies=not no_remedies)
    render_terminal(report, console_for(sys.stdout))
    return exit_code(report)


def default_directory(name: str) -> Path:
    """``runs/NAME-TIME``, with a number behind it where that is taken."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = (Path("runs") / (stem + (f"-{i}" if i else "")) for i in range(1000))
    return next(path for path in candidates if not path.exists())


def run_scenario(scenario: Scenario, directory: Path, *, remedies: bool) -> Report:
    """Treats ``scenario`` in ``directory`` and leaves its report there."""
    make_directory(directory)
    try:
        return _run_in(scenario, directory, remedies=remedies)
    except UsageError:
        shutil.rmtree(directory)  # nothing was run, so nothing is left behind
        raise


def _run_in(scenario: Scenario, directory: Path, *, remedies: bool) -> Report:
    view = LiveView(sys.stderr)
    with Launcher(directory / "server.log", progress=view.progress) as launcher, view:

        def launch(label: str, request: Request) -> Run:
            view.begin(label, directory / label)
            finished = launcher.run(request, directory / label)
            view.end(how_it_ended(finished))
            return finished

        treatment = treat(scenario, launch, Plan(remedies=remedies))
    report = build_report(
        treatment,
        command=shlex.join(["dtypedoctor", *sys.argv[1:]]),
        files={"report": REPORT_JSON, "markdown": REPORT_MD, "before": "before", "log": "server.log"},
        next_command=f"dtypedoctor report {directory} --format md",
    )
    write_report(directory, report)
    return report


def exit_code(report: Report) -> int:
    """The exit code that a finished report stands for."""
    if (
        report.status is Status.WORKER_DIED
        and report.before is not None
        and not report.before.loss
        and not report.strip
    ):
        return int(ExitCode.FINDINGS if report.findings else ExitCode.NO_TRACE)
    if report.expectation_met is not None:
        return int(ExitCode.OK if report.expectation_met else ExitCode.FINDINGS)
    remain = any(f.severity is not Severity.INFO for f in report.findings) or report.status is not Status.HEALTHY
    return int(ExitCode.FINDINGS if remain else ExitCode.OK)
