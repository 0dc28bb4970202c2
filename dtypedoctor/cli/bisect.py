"""``dtypedoctor bisect``: the smallest culprit, by intervention."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="bisect", epilog="Example:  dtypedoctor bisect --model builtin:gemma4-tiny --dtype float16")(
        bisect
    )


def bisect(
    scenario: Annotated[
        str | None,
        typer.Argument(help="A scenario's file, or the name of one that comes with the program.", metavar="SCENARIO"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="builtin:NAME, a folder, a hub id in the cache, or package.module:factory."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="dtype of the model.", show_default="float16, or the scenario's")
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            help="forward, train, sft, grpo or generate.",
            show_default="that of a builtin model's scenario, else one forward and backward pass",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run directory to create.", show_default="runs/NAME-TIME")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Run directory of a bisection that was interrupted.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            help="Largest accepted difference of log-probabilities from float32.",
            show_default="from the reference's own sensitivity",
        ),
    ] = None,
    time_limit: Annotated[
        int | None, typer.Option("--time-limit", help="Seconds for one run.", min=1, show_default="the scenario's")
    ] = None,
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Run code that a stranger's file names.")] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", help="Runs at a time.", min=1, show_default="one for each core or GPU, at most 4"),
    ] = None,
) -> int:
    """Find which modules must be kept in float32, which corrections are needed, and in which modes it fails.

    Exits 0 if the model does not fail and nothing else was found, 10 if it does, whatever is found out about it, or if findings
    remain that no bisection can look for; 2 if it cannot be run; 3 if the worker left no usable trace. Ctrl-C ends with the best answer so far; --resume goes on after any end and repeats no run.
    """
    from dtypedoctor.cli.bisect_case import Options, new_case, resumed_case
    from dtypedoctor.cli.bisecting import bisect_case
    from dtypedoctor.cli.endings import exit_code
    from dtypedoctor.cli.formats import TERMINAL, show
    from dtypedoctor.report.run_document import bisection_document

    options = Options(
        scenario=scenario,
        model=model,
        dtype=dtype,
        workload=workload,
        device=device,
        out=out,
        tolerance=tolerance,
        time_limit=time_limit,
        allow_code=allow_code,
    )
    case = resumed_case(resume, options) if resume is not None else new_case(options)
    report = bisect_case(case, jobs)
    show(bisection_document(report), TERMINAL)
    return exit_code(report)
