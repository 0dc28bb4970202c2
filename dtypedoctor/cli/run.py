"""``dtypedoctor run``: scenarios from failure to proven fix."""

from pathlib import Path
from typing import Annotated

import typer

from dtypedoctor.cli.output import TERMINAL, AllowCode, Device, EveryNSteps, FormatOption, NprocPerNode, Out, show


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="run", epilog="Example:  dtypedoctor run scenarios/gemma4_grpo_fp16.yaml --out runs/first")(run)


def run(
    scenarios: Annotated[
        list[str],
        typer.Argument(
            help="Scenario files, directories of them, or names of built-in scenarios.",
            metavar="SCENARIO...",
        ),
    ],
    out: Out = None,
    no_remedies: Annotated[bool, typer.Option("--no-remedies", help="Stop after the diagnosis: try no fixes.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", help="Override the model: builtin:NAME, a directory or a hub id.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Override the dtype of every model.")] = None,
    device: Device = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Override the seed.")] = None,
    nproc_per_node: NprocPerNode = None,
    every_n_steps: EveryNSteps = None,
    allow_code: AllowCode = False,
    format: FormatOption = TERMINAL,
) -> int:
    """Run scenarios: reproduce the failure, diagnose it, try each proposed fix and compare with the reference run.

    Exits 0 if nothing is wrong, or if each scenario fails and is fixed as it expects; 10 if findings remain; 3 if the worker
    left no usable trace. Several scenarios get a directory each, and one matrix of all of them is printed.
    """
    from dtypedoctor.cli.running import exit_code, load_all, matrix_exit, treat_all, treat_scenario
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.matrix import matrix_document
    from dtypedoctor.report.run_document import run_document
    from dtypedoctor.runner.directories import new_directory
    from dtypedoctor.scenario.loading import override
    from dtypedoctor.trials.treatment import Plan

    plan = Plan(remedies=not no_remedies)
    loaded = [
        override(
            one,
            model=model,
            dtype=dtype,
            device=device,
            seed=seed,
            processes=nproc_per_node,
            watch_every=every_n_steps,
        )
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
