"""``dtypedoctor exec``: any script, unchanged, with the watch around it."""

import sys
from importlib.util import decode_source
from pathlib import Path
from typing import Annotated

import typer

from dtypedoctor.errors import UsageError

WEEK = 604_800
MOST_PROCESSES = 64


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(
        name="exec",
        epilog="Example:  dtypedoctor exec --out runs/first train.py --epochs 3",
        context_settings={"allow_interspersed_args": False},
    )(execute)


def execute(
    script: Annotated[
        str,
        typer.Argument(
            help="Script, directory or archive; - for standard input; a module's name after -m, source text after -c.",
            metavar="SCRIPT",
        ),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.", metavar="ARGS")] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module as `python -m` does.")] = False,
    text: Annotated[bool, typer.Option("-c", help="Run source text as `python -c` does.")] = False,
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
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", help="Run it in so many processes, with torchrun.", min=1, max=MOST_PROCESSES),
    ] = None,
    watch_every: Annotated[
        int, typer.Option("--watch-every", help="Measure every module in each so-many-th step only; 0: never.", min=0)
    ] = 1,
    propagate_exit: Annotated[
        bool, typer.Option("--propagate-exit", help="Exit with the script's own status.")
    ] = False,
) -> int:
    """Run a script as Python would, watched, and say what went wrong in it.

    Exits 0 if nothing was found and the script ended well, 10 otherwise. What the script prints stays on its own streams;
    the verdict goes to stderr. Options of dtypedoctor stand before SCRIPT, those of the script after it.
    """
    if module and text:
        raise UsageError("give either -m or -c", "-m runs a module, -c source text.")
    if not (module or text or script == "-" or Path(script).exists()):
        raise UsageError(f"{script}: no such script", "Give a file, or -m and the name of a module.")
    from dtypedoctor.cli.console import console_for
    from dtypedoctor.cli.endings import exit_code
    from dtypedoctor.cli.treating import treat_script
    from dtypedoctor.report.run_document import run_document
    from dtypedoctor.report.to_terminal import print_document
    from dtypedoctor.runner.directories import job_directory, new_directory, scenario_name
    from dtypedoctor.scenario.model import Distributed, Scenario, ScenarioStep, Script
    from dtypedoctor.trace.ranks import member, rank_directory
    from dtypedoctor.trials.treatment import Plan

    target = {"module": script} if module else {"code": script} if text else {"path": script}
    if target == {"path": "-"}:
        target["code"] = _standard_input()
    scenario = Scenario(
        name=scenario_name("command" if text else "stdin" if script == "-" else script),
        summary="A script, run unchanged.",
        time_limit=time_limit,
        deterministic=False,
        watch_every=watch_every,
        remedies=attempt or [],
        distributed=Distributed(processes=nproc) if nproc is not None else None,
        steps=[ScenarioStep(workload=Script(kind="script", args=arguments or [], **target))],
    )
    here = member()
    if here is not None and nproc is not None:
        raise UsageError(
            "--nproc: this process is one of several already", "Leave it out: RANK and WORLD_SIZE are set."
        )
    again = here is None  # only its launcher can start a job once more
    plan = Plan(closer=again and not once, certify=again and certify, only=_known(attempt or []))
    if here is not None:
        out = rank_directory(out if out is not None else job_directory(scenario.name), here.rank)
    report, status = treat_script(scenario, new_directory(out, scenario.name), plan)
    print_document(run_document(report), console_for(sys.stderr))
    own = propagate_exit or here is not None  # a launcher ends the whole job where one of its processes fails
    return status if own else exit_code(report)


def _standard_input() -> str:
    """The program on standard input, whose end the program then finds there, as under ``python -``."""
    source = sys.stdin.buffer.read() if sys.stdin is not None else b""
    try:
        return decode_source(source)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UsageError(f"standard input: not Python source text: {error}", "Save it as UTF-8.") from error


def _known(wanted: list[str]) -> frozenset[str]:
    from dtypedoctor.trials.remedies import remedies

    for name in wanted:
        if name not in remedies():
            raise UsageError(f"--try: there is no remedy {name!r}", f"Known: {', '.join(remedies())}.")
    return frozenset(wanted)
