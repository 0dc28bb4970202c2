"""``dtypedoctor run``: scenarios from failure to proven cure."""

from pathlib import Path
from typing import Annotated

import typer

from dtypedoctor.cli.formats import TERMINAL, FormatOption, show

MOST_PROCESSES = 64


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
    format: FormatOption = TERMINAL,
) -> int:
    """Run scenarios: before, diagnosis, every proposed remedy, and the reference.

    Exits 0 if nothing is wrong, or if each scenario failed and was cured as it says; 10 if findings remain; 3 if the worker
    left no usable trace. Several scenarios get a folder each, and a matrix of all of them is printed.
    """
    from dtypedoctor.cli.endings import exit_code
    from dtypedoctor.cli.many import load_all, matrix_exit, treat_all
    from dtypedoctor.cli.treating import treat_scenario
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.matrix import matrix_document
    from dtypedoctor.report.run_document import run_document
    from dtypedoctor.runner.directories import new_directory
    from dtypedoctor.scenario.overrides import override
    from dtypedoctor.trials.treatment import Plan

    plan = Plan(remedies=not no_remedies)
    loaded = [
        override(one, model=model, dtype=dtype, device=device, seed=seed, processes=nproc, watch_every=watch_every)
        for one in load_all(scenarios, allow_code=allow_code)
    ]
    if len(loaded) == 1 and not Path(scenarios[0]).is_dir():
        report = treat_scenario(loaded[0], new_directory(out, loaded[0].name), plan)
        show(run_document(report if format == TERMINAL else redact(report)), format)
        return exit_code(report)
    rows, reports = treat_all(loaded, new_directory(out, "scenarios"), plan)
    shown = reports if format == TERMINAL else list(map(redact, reports))
    show(matrix_document(rows, shown, exit_code=matrix_exit(rows)), format)
    return matrix_exit(rows)
