"""The verbs that start no run: they print what there is, a model, a finished run, two of them, pages, scenarios, this machine."""

import gc
import json
import shlex
import sys
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtypedoctor.cli import completion
from dtypedoctor.cli.output import TERMINAL, FormatOption, announce, show, show_markdown, shows_runs
from dtypedoctor.errors import ExitCode, UsageError
from dtypedoctor.interruptions import say

if TYPE_CHECKING:
    from dtypedoctor.report.model import Report


def register(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command(name="inspect", epilog="Example:  dtypedoctor inspect ./checkpoint --dtype float16 --scaler")(inspect)
    app.command(name="report", epilog="Example:  dtypedoctor report runs/gemma4_grpo_fp16-... --format md > ticket.md")(
        report
    )
    app.command(name="compare", epilog="Example:  dtypedoctor compare runs/float16 runs/float16/reference")(compare)
    app.command(name="explain", epilog="Example:  dtypedoctor explain float16-overflow")(explain)
    app.command(name="scenarios", epilog="Example:  dtypedoctor scenarios --schema > scenario.schema.json")(scenarios)
    app.command(name="env", epilog="Example:  dtypedoctor env --format md")(env)


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="Checkpoint directory or file, downloaded hub id, or builtin:NAME.",
            metavar="MODEL_OR_CHECKPOINT",
        ),
    ],
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="dtype it will be loaded in.", autocompletion=completion.dtypes)
    ] = None,
    scaler: Annotated[bool, typer.Option("--scaler", help="It will be trained with GradScaler.")] = False,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="It will be sharded with FSDP.")] = False,
    format: FormatOption = TERMINAL,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.", hidden=True)] = False,
) -> int:
    """List the dtypes of a model's parameters, quantization states and config, and the failures to expect.

    Weights are not loaded: only a checkpoint's headers are read, in milliseconds. Exits 0 if nothing is found, else 10.
    """
    announce(f"Inspecting {model}", terminal_only=True)  # one that has no files is built, after the import of torch
    from dtypedoctor.cli.scenario_files import require_builtin
    from dtypedoctor.diagnosis import preflight
    from dtypedoctor.diagnosis.checkpoint import FLOATS, Intent
    from dtypedoctor.report.surveys import Inspection, inspection_document
    from dtypedoctor.trials.treatment import subject_of

    if dtype is not None and dtype not in FLOATS:
        raise UsageError(
            f"--dtype: {dtype!r} is not a dtype to load a model in", f"Known: {', '.join(sorted(FLOATS))}."
        )
    require_builtin(model)
    subject = subject_of(model, Intent(dtype=dtype, scaler=scaler, fsdp=fsdp))
    inspection = Inspection(subject=subject, findings=preflight(subject))
    show(inspection_document(inspection), "json" if as_json else format)
    return int(ExitCode.FINDINGS if inspection.troubled else ExitCode.OK)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run directory, of one run or of several scenarios, or a report.json. Several: of one job, recorded on several machines.",
            metavar="RUN...",
        ),
    ],
    format: FormatOption = TERMINAL,
) -> None:
    """Print the report of a finished run."""
    announce(f"Reading {', '.join(map(str, runs))}", terminal_only=True)  # a long trace without a report takes seconds
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.files import read_matrix, with_pictures
    from dtypedoctor.report.matrix import matrix_document, matrix_exit
    from dtypedoctor.report.run_document import run_document

    gc.disable()  # the process ends with the report, and looking for garbage in a long trace takes a fifth of the time
    run = runs[0]
    several = read_matrix(run) if len(runs) == 1 else None
    if several is not None:
        rows, reports = several
        shown = reports if format == TERMINAL else list(map(redact, reports))
        show(matrix_document(rows, shown, exit_code=matrix_exit(rows)), format)
        return
    found = _report_of(runs)
    if shows_runs(format):
        found = with_pictures(found, run if run.is_dir() else run.parent)
    show(run_document(found if format == TERMINAL else redact(found)), format)


def _report_of(runs: list[Path]) -> "Report":
    from dtypedoctor.report.files import report_of, report_of_machines

    return report_of(runs[0]) if len(runs) == 1 else report_of_machines(runs)


def compare(
    run_a: Annotated[
        Path, typer.Argument(help="Run directory, one of its parts (RUN/reference), or a trace.", metavar="RUN_A")
    ],
    run_b: Annotated[Path, typer.Argument(help="The run to compare it with.", metavar="RUN_B")],
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            help="Largest relative error that counts as equal; 0: every recorded digit.",
            show_default="expected rounding error, from dtype, length of sums and steps",
        ),
    ] = None,
    format: FormatOption = TERMINAL,
) -> int:
    """Compare two runs of the same model, module by module and step by step.

    They may differ in dtype, device, library versions or attention implementation; all differences are listed. Exits 0 if
    they are equal within the tolerance, 10 if they diverge or if one lacks what the other has measured.
    """
    announce(f"Comparing {run_a} with {run_b}", terminal_only=True)
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.comparison_document import comparison_document
    from dtypedoctor.runner.run import open_run
    from dtypedoctor.trials.compare import compare_runs
    from dtypedoctor.trials.comparison import Verdict

    if tolerance is not None and not (isfinite(tolerance) and tolerance >= 0):
        raise UsageError(f"--tolerance {tolerance}: not a relative error", "Use a number of at least 0, such as 0.01.")
    found = compare_runs(open_run(run_a), open_run(run_b), tolerance)
    show(comparison_document(found if format == TERMINAL else redact(found)), format)
    if format == TERMINAL:
        again = shlex.join(["dtypedoctor", "compare", str(run_a), str(run_b), "--format", "md"])
        say(f"\nNext: {again}")
    return int(ExitCode.OK if found.verdict is Verdict.EQUAL else ExitCode.FINDINGS)


def explain(
    finding: Annotated[
        str | None,
        typer.Argument(
            help="Finding or fix id; without it, all are listed.", metavar="ID", autocompletion=completion.explained
        ),
    ] = None,
    patch: Annotated[
        bool, typer.Option("--patch", help="Print a library's correction as a diff against its source, with a test.")
    ] = False,
    source: Annotated[
        str | None,
        typer.Option("--source", help="Folder with the library's package [default: the installed one]", metavar="DIR"),
    ] = None,
) -> None:
    """Print the page about a finding (symptoms, cause, evidence, fixes), or what a fix changes and where it can be put in."""
    from dtypedoctor.diagnosis.registry import by_family, finding_ids, readable_page
    from dtypedoctor.report.library_patch import about, patch_of
    from dtypedoctor.trials.remedies import edits_of, reach_of_modules, reaches

    fixes = {one.remedy.id: one for one in reaches()}
    if finding is None:
        for family, specs in by_family().items():
            print(f"{family.id}: {', '.join(spec.id for spec in specs)}")
        print(f"fixes: {', '.join(fixes)}")
        say("\nNext: dtypedoctor explain ID")
        return
    fix = fixes.get(finding) or reach_of_modules(finding)
    if patch:
        print(patch_of(edits_of(finding), sys.path if source is None else [source]), end="")
        return
    if fix is not None and finding not in finding_ids():
        print(about(fix))
        return
    show_markdown(readable_page(finding))
    if fix is not None:  # a finding and its fix may have one id
        print(f"\n## The fix of this name\n\n{about(fix)}")


def scenarios(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Scenario files to check, without running them.", metavar="[FILE]...", show_default=False),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of scenario files, for editors, and exit.")
    ] = False,
) -> int:
    """List the built-in scenarios, or check scenario files; exits 2 if there is a mistake in one."""
    from dtypedoctor.cli.scenario_files import load_checked
    from dtypedoctor.scenario.loading import available, json_schema

    if schema:
        print(json.dumps(json_schema(), indent=2))
        return int(ExitCode.OK)
    if files:
        return _check(files)
    found = [load_checked(path, allow_code=True) for path in available()]
    width = max((len(s.name) for s in found), default=0)
    for scenario in found:
        print(f"{scenario.name:<{width}}  {scenario.summary}")
    say("\nNext: dtypedoctor run NAME")
    return int(ExitCode.OK)


def _check(files: list[Path]) -> int:
    """Prints the mistakes of all files, each with its line."""
    from dtypedoctor.cli.scenario_files import load_checked
    from dtypedoctor.text import counted, paragraphs

    wrong = 0
    for file in files:
        try:
            load_checked(file, allow_code=True)  # nothing is run
        except UsageError as error:
            wrong += 1
            say(paragraphs("\n".join(filter(None, (error.message, error.hint))), 10_000))
    print(f"{counted(len(files), 'scenario file')} checked, {wrong or 'none'} with mistakes")
    return int(ExitCode.USAGE if wrong else ExitCode.OK)


def env(
    format: FormatOption = TERMINAL,
) -> None:
    """Print versions, devices, driver and the environment variables that matter, to paste into an issue.

    It is the environment table of every report plus what `torch.utils.collect_env` adds, without anything private.
    """
    announce("Reading versions and devices", terminal_only=True)  # torch is asked, in a process of its own
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.surveys import environment_document, survey

    # it is printed to be pasted elsewhere, so it is redacted at the prompt, too
    show(environment_document(redact(survey())), format)
    if format == TERMINAL:
        say("\nNext: dtypedoctor run gemma4_grpo_fp16")
