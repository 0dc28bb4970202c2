"""``dtypedoctor run``: scenarios from failure to proven fix. ``dtypedoctor bisect``: the smallest culprit, by intervention."""

from pathlib import Path
from typing import Annotated

import typer

from dtypedoctor.cli import completion
from dtypedoctor.cli.output import (
    TERMINAL,
    AllowCode,
    Device,
    EveryNSteps,
    FormatOption,
    NprocPerNode,
    OpenPage,
    Out,
    announce,
    leave_page,
    leave_report_page,
    show,
)

MANY = 4
"""Scenarios that are counted and not named when they begin."""


def register(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command(name="run", epilog="Example:  dtypedoctor run scenarios/gemma4_grpo_fp16.yaml --out runs/first")(run)
    app.command(name="bisect", epilog="Example:  dtypedoctor bisect --model builtin:gemma4-tiny --dtype float16")(
        bisect
    )


ResidentWorkers = Annotated[
    bool | None,
    typer.Option(
        "--resident-workers/--fresh-workers",
        help="Keep the model loaded for all runs, or load it anew in a new process for each.",
        show_default="loaded once on a CPU, anew on a GPU",
    ),
]


def run(
    scenarios: Annotated[
        list[str],
        typer.Argument(
            help="Scenario files, directories of them, or names of built-in scenarios.",
            metavar="SCENARIO...",
            autocompletion=completion.scenarios,
        ),
    ],
    out: Out = None,
    no_remedies: Annotated[bool, typer.Option("--no-remedies", help="Stop after the diagnosis: try no fixes.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Override the model: builtin:NAME, a directory or a hub id.",
            autocompletion=completion.builtin_models,
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Override the dtype of every model.", autocompletion=completion.dtypes)
    ] = None,
    device: Device = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Override the seed.")] = None,
    nproc_per_node: NprocPerNode = None,
    every_n_steps: EveryNSteps = None,
    wheels: Annotated[
        Path | None,
        typer.Option(
            "--wheels", help="Folder of unpacked releases, NAME-VERSION each, for scenarios that require some."
        ),
    ] = None,
    allow_code: AllowCode = False,
    resident_workers: ResidentWorkers = None,
    format: FormatOption = TERMINAL,
    open_page: OpenPage = False,
) -> int:
    """Run scenarios: reproduce the failure, diagnose it, try each proposed fix and compare with the reference run.

    Exits 0 if nothing is wrong, or if each scenario fails and is fixed as it expects; 10 if findings remain; 3 if the worker
    left no usable trace. Several scenarios get a directory each, and one matrix of all of them is printed.
    """
    announce(f"Running {' '.join(scenarios) if len(scenarios) < MANY else f'{len(scenarios)} scenarios'}")
    from dtypedoctor.cli.reported import exit_code
    from dtypedoctor.cli.running import load_all, matrix_exit, treat_all, treat_scenario
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.matrix import matrix_document
    from dtypedoctor.report.run_document import run_document
    from dtypedoctor.runner.directories import new_directory
    from dtypedoctor.scenario.loading import override
    from dtypedoctor.trials.plan import Plan

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
        directory = new_directory(out, loaded[0].name)
        report = treat_scenario(loaded[0], directory, plan, wheels=wheels, resident=resident_workers)
        show(run_document(report if format == TERMINAL else redact(report)), format)
        leave_report_page(directory, report, open_it=open_page)
        return exit_code(report)
    directory = new_directory(out, "scenarios")
    rows, reports = treat_all(loaded, directory, plan, wheels, resident=resident_workers)
    public = list(map(redact, reports))
    show(matrix_document(rows, reports if format == TERMINAL else public, exit_code=matrix_exit(rows)), format)
    leave_page(directory, matrix_document(rows, public, exit_code=matrix_exit(rows)), open_it=open_page)
    return matrix_exit(rows)


ScenarioArgument = Annotated[
    str | None, typer.Argument(help="Scenario file, or the name of a built-in scenario.", metavar="SCENARIO")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="builtin:NAME, a directory, a downloaded hub id, or package.module:factory.",
        autocompletion=completion.builtin_models,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="dtype of the model.",
        autocompletion=completion.dtypes,
        show_default="float16, or the scenario's",
    ),
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(
        "--workload",
        help="forward, train, sft, grpo or generate.",
        show_default="that of a builtin model's scenario, else one forward and backward pass",
    ),
]
Resume = Annotated[
    Path | None, typer.Option("--resume", help="Continue an interrupted bisection from its run directory.")
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        help="Largest accepted difference of log-probabilities from float32.",
        show_default="from the reference's own sensitivity",
    ),
]
TimeLimit = Annotated[
    int | None, typer.Option("--time-limit", help="Seconds for one run.", min=1, show_default="the scenario's")
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", help="Runs at a time.", min=1, show_default="one per core or GPU, at most 4"),
]


def bisect(
    scenario: ScenarioArgument = None,
    model: ModelOption = None,
    dtype: Dtype = None,
    workload: WorkloadOption = None,
    device: Device = None,
    out: Out = None,
    resume: Resume = None,
    tolerance: Tolerance = None,
    time_limit: TimeLimit = None,
    allow_code: AllowCode = False,
    jobs: Jobs = None,
    resident_workers: ResidentWorkers = None,
    open_page: OpenPage = False,
) -> int:
    """Find the smallest set of modules to keep in float32, the corrections needed, and the modes that fail.

    Exits 0 if the model does not fail and nothing else is found; 10 if it fails, whatever the bisection finds, or if findings
    remain that no bisection can explain; 2 if it cannot be run; 3 if the worker left no usable trace. Ctrl-C reports the best
    answer so far; --resume continues after any end and repeats no run.
    """
    announce(f"Bisecting {scenario or model or resume or ''}".rstrip())
    from dtypedoctor.cli.bisecting import Options, bisect_case, new_case, resumed_case
    from dtypedoctor.cli.reported import exit_code
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
    report = bisect_case(case, jobs, resident=resident_workers)
    show(bisection_document(report), TERMINAL)
    leave_report_page(case.directory, report, open_it=open_page, bisection=True)
    return exit_code(report)
