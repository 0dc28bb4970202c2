"""``dtypedoctor exec``: any script, unchanged, with the watch around it."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from dtypedoctor.cli.console import console_for
from dtypedoctor.cli.run import default_directory, exit_code
from dtypedoctor.errors import UsageError
from dtypedoctor.report.build import build_report
from dtypedoctor.report.files import REPORT_JSON, REPORT_MD, write_report
from dtypedoctor.report.model import Report
from dtypedoctor.report.terminal import render_terminal
from dtypedoctor.runner.launch import Run, make_directory
from dtypedoctor.runner.script import run_script
from dtypedoctor.scenario.model import Scenario, ScenarioStep, Script
from dtypedoctor.scenario.request import Request
from dtypedoctor.trials.treatment import Plan, treat

WEEK = 604_800


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        name="exec",
        epilog="Example:  dtypedoctor exec --out runs/first train.py --epochs 3",
        context_settings={"allow_interspersed_args": False},
    )(execute)


def execute(
    script: Annotated[str, typer.Argument(help="Script, or a module's name after -m.", metavar="SCRIPT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.", metavar="ARGS")] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module as `python -m` does.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory to create.", show_default="runs/NAME-TIME")
    ] = None,
    time_limit: Annotated[
        int, typer.Option("--time-limit", help="Seconds after which the script is stopped.", min=1, max=WEEK)
    ] = WEEK,
    attempt: Annotated[
        list[str] | None, typer.Option("--try", help="Run again with this remedy switched on from outside.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Never run the script a second time to look closer at a failure.")
    ] = False,
    certify: Annotated[
        bool, typer.Option("--certify", help="Run it once more unwatched, and say whether watching changed anything.")
    ] = False,
    propagate_exit: Annotated[
        bool, typer.Option("--propagate-exit", help="Exit with the script's own status.")
    ] = False,
) -> int:
    """Run a script as Python would, watched, and say what went wrong in it.

    Exits 0 if nothing was found and the script ended well, 10 otherwise. What the script prints stays on its own streams;
    the verdict goes to stderr. Options of dtypedoctor stand before SCRIPT, those of the script after it.
    """
    if not module and not Path(script).exists():
        raise UsageError(f"{script}: no such script", "Give a file, or -m and a module.")
    workload = Script(
        kind="script",
        path=None if module else script,
        module=script if module else None,
        args=arguments or [],
    )
    directory = out if out is not None else default_directory(script_name(script))
    report, status = _treated(
        _scenario(workload, time_limit),
        directory,
        Plan(closer=not once, certify=certify, only=frozenset(attempt or ())),
    )
    render_terminal(report, console_for(sys.stderr))
    return status if propagate_exit else exit_code(report)


def _treated(scenario: Scenario, directory: Path, plan: Plan) -> tuple[Report, int]:
    """Treats a script in ``directory``; its report and its own exit status, as a shell would give it."""
    make_directory(directory)

    def launch(label: str, request: Request) -> Run:
        first = label == "before"
        if not first:
            print(f"dtypedoctor: running the script again ({label}) …", file=sys.stderr, flush=True)
        return run_script(request, directory / label, live=first)

    treatment = treat(scenario, launch, plan)
    report = build_report(
        treatment,
        command=shlex.join(["dtypedoctor", *sys.argv[1:]]),
        files={"report": REPORT_JSON, "markdown": REPORT_MD, "before": "before"},
        next_command=f"dtypedoctor report {directory} --format md",
    )
    write_report(directory, report)
    code = treatment.before.exit.code
    return report, code if code >= 0 else 128 - code


def _scenario(workload: Script, time_limit: int) -> Scenario:
    return Scenario(
        name=script_name(workload.path or workload.module or ""),
        summary="A script of the user's, unchanged.",
        time_limit=time_limit,
        deterministic=False,
        steps=[ScenarioStep(workload=workload)],
    )


def script_name(script: str) -> str:
    """A scenario's name made from that of a script or module."""
    words = re.sub(r"[^a-z0-9_.-]+", "-", Path(script).name.removesuffix(".py").lower())
    return words.strip("-_.")[:100] or "script"
