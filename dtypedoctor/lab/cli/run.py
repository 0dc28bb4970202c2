"""``dtypedoctor run``: scenarios from failure to proven fix. ``dtypedoctor bisect``: the smallest culprit, by intervention."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtypedoctor.cli.output import (
    TERMINAL,
    AllowCode,
    Device,
    DeviceMap,
    FormatOption,
    NprocPerNode,
    OpenPage,
    Out,
    announce,
    console_for,
    leave_page,
    leave_report_page,
    left_in,
    show,
)

if TYPE_CHECKING:
    from dtypedoctor.lab.cli.many import Batch
    from dtypedoctor.lab.runner.executors import Where
    from dtypedoctor.lab.scenarios.model import Scenario

MANY = 4
"""Scenarios that are counted and not named when they begin."""


def register(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command(name="run", epilog="Example:  dtypedoctor run gemma4_grpo_fp16 --out runs/first")(run)
    app.command(name="bisect", epilog="Example:  dtypedoctor bisect --model builtin:gemma4-tiny --dtype float16")(
        bisect
    )


Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        help="Scenarios at a time.",
        min=1,
        show_default="1; on Slurm 8; on Ray what fits",
    ),
]
ExecutorOption = Annotated[
    str,
    typer.Option("--executor", help="What runs them: local, ray, slurm (by submitit), or submitit-local."),
]
SlurmOption = Annotated[
    list[str] | None,
    typer.Option("--slurm", help="Parameter of Slurm's jobs, e.g. partition=gpu.", metavar="KEY=VALUE"),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        help="GPUs of each job on a cluster.",
        min=0,
        show_default="1 where the scenario takes CUDA, or Ray has some",
    ),
]


ResumeRun = Annotated[
    Path | None,
    typer.Option("--resume", help="Continue several scenarios that were interrupted, from their directory."),
]


def run(
    scenarios: Annotated[
        list[str] | None,
        typer.Argument(
            help="Scenario files, directories of them, or names of built-in scenarios.", metavar="SCENARIO..."
        ),
    ] = None,
    out: Out = None,
    resume: ResumeRun = None,
    no_remedies: Annotated[bool, typer.Option("--no-remedies", help="Stop after the diagnosis: try no fixes.")] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Override the model: builtin:NAME, a directory or a hub id."),
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Override the dtype of every model.")] = None,
    device: Device = None,
    device_map: DeviceMap = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Override the seed.")] = None,
    nproc_per_node: NprocPerNode = None,
    wheels: Annotated[
        Path | None,
        typer.Option(
            "--wheels", help="Folder of unpacked releases, NAME-VERSION each, for scenarios that require some."
        ),
    ] = None,
    allow_code: AllowCode = False,
    executor: ExecutorOption = "local",
    jobs: Jobs = None,
    slurm: SlurmOption = None,
    gpus: Gpus = None,
    format: FormatOption = TERMINAL,
    open_page: OpenPage = False,
) -> int:
    """Run scenarios: reproduce the failure, diagnose it, try each proposed fix and compare with the reference run.

    Exits 0 if nothing is wrong, or if each scenario fails and is fixed as it expects; 10 if findings remain; 3 if the worker
    left no usable trace, or its machine was lost. Several scenarios get a directory each, and one matrix of all of them is printed.
    """
    named = scenarios or ([str(resume)] if resume is not None else [])
    announce(f"Running {' '.join(named) if len(named) < MANY else f'{len(named)} scenarios'}")
    where = _where(executor, jobs, slurm, gpus)
    from dtypedoctor.errors import UsageError
    from dtypedoctor.lab.cli.many import new_batch, resumed_batch
    from dtypedoctor.lab.cli.running import load_all
    from dtypedoctor.lab.scenarios.loading import override

    if bool(scenarios) == (resume is not None):
        raise UsageError("pass either SCENARIO or --resume", "For example: dtypedoctor run gemma4_grpo_fp16")
    changes: dict[str, Any] = {
        "model": model, "dtype": dtype, "device": device, "seed": seed, "processes": nproc_per_node,
        "device_map": device_map,
    }  # fmt: skip
    if resume is not None:
        if no_remedies or any(one is not None for one in (out, wheels, *changes.values())):
            raise UsageError(
                "--resume continues with the original options",
                "Pass it alone, or with --allow-code, --jobs and the options of an executor.",
            )
        return _treat_several(resumed_batch(resume, allow_code=allow_code), where, format, open_page=open_page)
    loaded = [override(one, **changes) for one in load_all(scenarios or [], allow_code=allow_code)]
    if len(loaded) == 1 and not Path(named[0]).is_dir() and executor == "local":
        if (jobs or 1) > 1:
            raise UsageError("--jobs has no effect with one scenario", "Pass several scenarios, or leave it out.")
        return _treat_one(loaded[0], out, format, remedies=not no_remedies, wheels=wheels, open_page=open_page)
    batch = new_batch(out, loaded, remedies=not no_remedies, wheels=wheels)
    return _treat_several(batch, where, format, open_page=open_page)


def _treat_one(scenario: "Scenario", out: Path | None, format: str, *, remedies: bool, wheels: Path | None,
               open_page: bool) -> int:  # fmt: skip
    from dtypedoctor.cli.reported import exit_code
    from dtypedoctor.lab.cli.running import treat_scenario
    from dtypedoctor.lab.trials.treatment import Plan
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.first_screen import print_first_screen
    from dtypedoctor.report.run_document import run_document
    from dtypedoctor.runner.directories import new_directory

    directory = new_directory(out, scenario.name)
    report = treat_scenario(scenario, directory, Plan(remedies=remedies), wheels=wheels)
    leave_report_page(directory, report, open_it=open_page)
    if format == TERMINAL:
        print_first_screen(report, console_for(sys.stdout), str(directory), left_in(directory))
    else:
        show(run_document(redact(report)), format)
    return exit_code(report)


def _treat_several(batch: "Batch", where: "Where", format: str, *, open_page: bool) -> int:
    from dtypedoctor.lab.cli.many import treat_all
    from dtypedoctor.lab.cli.matrix import matrix_document, matrix_exit
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.runner.directories import removed_if_refused

    with nullcontext() if batch.resumed else removed_if_refused(batch.directory):
        rows, reports = treat_all(batch, where)
    public = list(map(redact, reports))
    code = matrix_exit(rows)
    show(matrix_document(rows, reports if format == TERMINAL else public, exit_code=code), format)
    leave_page(batch.directory, matrix_document(rows, public, exit_code=code), open_it=open_page)
    return code


def _where(executor: str, jobs: int | None, slurm: list[str] | None, gpus: int | None) -> "Where":
    """On which machines to run.

    Raises:
        UsageError: the executor is not installed, or an option does not fit it.
    """
    from dtypedoctor.errors import UsageError
    from dtypedoctor.lab.runner.executors import Where, require_executor

    for one in slurm or ():
        if not one.partition("=")[0] or not one.partition("=")[2]:
            raise UsageError(f"--slurm {one}: a parameter is KEY=VALUE", "For example: --slurm partition=gpu")
    where = Where(
        executor=executor,
        jobs=jobs,
        slurm=dict(one.partition("=")[::2] for one in slurm or ()),
        gpus=gpus,
    )
    require_executor(where)
    return where


ScenarioArgument = Annotated[
    str | None, typer.Argument(help="Scenario file, or the name of a built-in scenario.", metavar="SCENARIO")
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="builtin:NAME, a directory, a downloaded hub id, or package.module:factory."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="dtype of the model.",
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


def bisect(
    scenario: ScenarioArgument = None,
    model: ModelOption = None,
    dtype: Dtype = None,
    workload: WorkloadOption = None,
    device: Device = None,
    device_map: DeviceMap = None,
    out: Out = None,
    resume: Resume = None,
    tolerance: Tolerance = None,
    time_limit: TimeLimit = None,
    allow_code: AllowCode = False,
    open_page: OpenPage = False,
) -> int:
    """Find the smallest set of modules to keep in float32, the corrections needed, and the modes that fail.

    Exits 0 if the model does not fail and nothing else is found; 10 if it fails, whatever the bisection finds, or if findings
    remain that no bisection can explain; 2 if it cannot be run; 3 if the worker left no usable trace. Ctrl-C reports the best
    answer so far; --resume continues after any end and repeats no run.
    """
    announce(f"Bisecting {scenario or model or resume or ''}".rstrip())
    from dtypedoctor.cli.reported import exit_code
    from dtypedoctor.lab.cli.bisecting import Options, bisect_case, new_case, resumed_case
    from dtypedoctor.report.run_document import bisection_document

    options = Options(
        scenario=scenario,
        model=model,
        dtype=dtype,
        workload=workload,
        device=device,
        device_map=device_map,
        out=out,
        tolerance=tolerance,
        time_limit=time_limit,
        allow_code=allow_code,
    )
    case = resumed_case(resume, options) if resume is not None else new_case(options)
    report = bisect_case(case)
    show(bisection_document(report), TERMINAL)
    leave_report_page(case.directory, report, open_it=open_page, bisection=True)
    return exit_code(report)
