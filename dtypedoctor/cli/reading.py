"""The verbs that start no run: they print what there is, a model, a finished run, pages, this machine."""

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtypedoctor.cli.output import TERMINAL, FormatOption, announce, show, show_markdown
from dtypedoctor.errors import ExitCode, UsageError
from dtypedoctor.foreign_files import reason
from dtypedoctor.interruptions import say

if TYPE_CHECKING:
    from dtypedoctor.diagnosis.checkpoint import Intent, Subject


def register(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command(name="report", epilog="Example:  dtypedoctor report runs/first --format md > ticket.md")(report)
    app.command(name="explain", epilog="Example:  dtypedoctor explain float16-overflow")(explain)
    app.command(name="inspect", epilog="Example:  dtypedoctor inspect ./checkpoint --dtype float16 --scaler")(inspect)
    app.command(name="env", epilog="Example:  dtypedoctor env --format md")(env)


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="Checkpoint directory or file, downloaded hub id, or builtin:NAME.",
            metavar="MODEL_OR_CHECKPOINT",
        ),
    ],
    dtype: Annotated[str | None, typer.Option("--dtype", help="dtype it will be loaded in.")] = None,
    scaler: Annotated[bool, typer.Option("--scaler", help="It will be trained with GradScaler.")] = False,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="It will be sharded with FSDP.")] = False,
    format: FormatOption = TERMINAL,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.", hidden=True)] = False,
) -> int:
    """List the dtypes of a model's parameters, quantization states and config, and the failures to expect.

    Only a checkpoint's headers are read, in milliseconds; with --dtype float16 the weights too (4 GiB a few seconds), to count those beyond its range. Exits 0 if nothing is found in weights that are all there, else 10.
    """
    announce(f"Inspecting {model}", terminal_only=True)  # one that has no files is built, after the import of torch
    from dtypedoctor.diagnosis import preflight
    from dtypedoctor.diagnosis.checkpoint import FLOATS, Intent
    from dtypedoctor.report.surveys import Inspection, inspection_document

    if dtype is not None and dtype not in FLOATS:
        raise UsageError(
            f"--dtype: {dtype!r} is not a dtype to load a model in", f"Known: {', '.join(sorted(FLOATS))}."
        )
    subject = _subject_of(model, Intent(dtype=dtype, scaler=scaler, fsdp=fsdp))
    inspection = Inspection(subject=subject, findings=preflight(subject))
    show(inspection_document(inspection), "json" if as_json else format)
    return int(ExitCode.OK if inspection.status == "healthy" else ExitCode.FINDINGS)


def _subject_of(model: str, intent: "Intent") -> "Subject":
    """The model: from its files, or built by a worker where it has none.

    Raises:
        UsageError: there is no such model.
        WorkerDiedError: the worker died while it built the model.
    """
    from dtypedoctor.diagnosis.checkpoint import cached, read_checkpoint

    path = Path(model)
    try:
        if path.exists():
            return read_checkpoint(path, intent)
    except OSError as error:
        raise UsageError(f"{model}: cannot be read ({reason(error)})", "Check the path and its permissions.") from error
    snapshot = cached(model) if ":" not in model else None
    if snapshot is not None:
        return read_checkpoint(snapshot, intent)
    from dtypedoctor.lab.trials.treatment import built_subject

    return built_subject(model, intent)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run directory, of one run or of several scenarios, or a report.json; a folder of run directories is listed. Several: of one job, recorded on several machines.",
            metavar="RUN...",
        ),
    ],
    format: FormatOption = TERMINAL,
    is_brief: Annotated[
        bool, typer.Option("--brief", help="With --format json: at most 2 KB, for a coding agent.")
    ] = False,
) -> None:
    """Print the report of a finished run."""
    if is_brief and format != "json":
        raise UsageError("--brief: only JSON has a brief form", "Add --format json.")
    announce(f"Reading {', '.join(map(str, runs))}", terminal_only=True)  # a long trace without a report takes seconds
    from dtypedoctor.lab.cli.matrix import matrix_document, matrix_exit, read_matrix
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.files import newest_runs, report_of, report_of_machines, runs_document, with_typed_paths
    from dtypedoctor.report.first_screen import brief
    from dtypedoctor.report.run_document import run_document

    gc.disable()  # the process ends with the report, and looking for garbage in a long trace takes a fifth of the time
    run = runs[0]
    several = read_matrix(run) if len(runs) == 1 and not is_brief else None
    if several is not None:
        rows, reports = several
        shown = reports if format == TERMINAL else list(map(redact, reports))
        show(matrix_document(rows, shown, exit_code=matrix_exit(rows)), format)
        return
    if len(runs) == 1 and (newest := newest_runs(run)):
        show(runs_document(run, newest), format)
        return
    found = report_of(run) if len(runs) == 1 else report_of_machines(runs)
    found = found if format == TERMINAL else redact(found)
    if format == TERMINAL or is_brief:  # read by who types the next command
        found = with_typed_paths(found, run)
    show((brief if is_brief else run_document)(found), format)


def explain(
    finding: Annotated[
        str | None,
        typer.Argument(help="Finding or fix id; without it, all are listed.", metavar="ID"),
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
    from dtypedoctor.diagnosis import by_family, finding_ids, readable_page
    from dtypedoctor.examination.fixes import edits_of, reach_of_modules, reaches
    from dtypedoctor.report.fixes import about, patch_of

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


def env(
    format: FormatOption = TERMINAL,
) -> None:
    """Print versions, devices, driver and the environment variables that matter, to paste into an issue.

    It is the environment table of every report, without anything private.
    """
    announce("Reading versions and devices", terminal_only=True)  # torch is asked, in a process of its own
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.surveys import environment_document, survey

    # it is printed to be pasted elsewhere, so it is redacted at the prompt, too
    show(environment_document(redact(survey())), format)
    if format == TERMINAL:
        say("\nNext: dtypedoctor exec train.py")
