"""``dtypedoctor run``: scenarios from failure to proven cure."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

MOST_PROCESSES = 64


class Format(StrEnum):
    """What can be printed of one scenario or of several."""

    TERMINAL = "terminal"
    JUNIT = "junit"
    GITHUB = "github"


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="run", epilog="Example:  dtypedoctor run scenarios/gemma4_grpo_fp16.yaml --out runs/first")(run)


def run(
    scenarios: Annotated[
        list[str],
        typer.Argument(
            help="Scenario files, folders of them, or names of scenarios that come with the program.",
            metavar="SCENARIO...",
        ),
    ],
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
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", help="Run it in so many processes, with torchrun.", min=1, max=MOST_PROCESSES),
    ] = None,
    watch_every: Annotated[
        int | None,
        typer.Option("--watch-every", help="Measure every module in each so-many-th step only; 0: never.", min=0),
    ] = None,
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Run code that a stranger's file names.")] = False,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            metavar=f"[{'|'.join(Format)}]",
            autocompletion=lambda: list(Format),
            help="What to print at the end: for a person, for a CI, or in a plug-in's format.",
        ),
    ] = Format.TERMINAL,
) -> int:
    """Run scenarios: before, diagnosis, every proposed remedy, and the reference.

    Exits 0 if nothing is wrong, or if each scenario failed and was cured as it says; 10 if findings remain; 3 if the worker
    left no usable trace. Several scenarios get a folder each, and a matrix of all of them is printed.
    """
    from dtypedoctor.cli.console import console_for
    from dtypedoctor.cli.endings import exit_code
    from dtypedoctor.cli.many import load_all, matrix_exit, treat_all
    from dtypedoctor.cli.standard_streams import write_document
    from dtypedoctor.cli.treating import treat_scenario
    from dtypedoctor.report.matrix_table import render_matrix
    from dtypedoctor.report.renderers import merger_of
    from dtypedoctor.report.terminal import render_terminal
    from dtypedoctor.runner.directories import new_directory
    from dtypedoctor.scenario.overrides import override
    from dtypedoctor.trials.treatment import Plan

    document = None if format == Format.TERMINAL else merger_of(format)
    plan = Plan(remedies=not no_remedies)
    loaded = [
        override(one, model=model, dtype=dtype, device=device, seed=seed, processes=nproc, watch_every=watch_every)
        for one in load_all(scenarios, allow_code=allow_code)
    ]
    if len(loaded) == 1 and not Path(scenarios[0]).is_dir():
        report = treat_scenario(loaded[0], new_directory(out, loaded[0].name), plan)
        if document is None:
            render_terminal(report, console_for(sys.stdout))
        else:
            write_document(document([report]))
        return exit_code(report)
    rows, reports = treat_all(loaded, new_directory(out, "scenarios"), plan)
    if document is None:
        render_matrix(rows, console_for(sys.stdout))
    else:
        write_document(document(reports))
    return matrix_exit(rows)
