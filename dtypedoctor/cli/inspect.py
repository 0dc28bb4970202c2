"""``dtypedoctor inspect``: what can be said of a model before it runs."""

from typing import Annotated

import typer

from dtypedoctor.cli.formats import TERMINAL, FormatOption, show
from dtypedoctor.errors import ExitCode, UsageError


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="inspect", epilog="Example:  dtypedoctor inspect ./checkpoint --dtype float16 --scaler")(inspect)


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder or file of a checkpoint, hub id that has been downloaded, or builtin:NAME.",
            metavar="MODEL_OR_CHECKPOINT",
        ),
    ],
    dtype: Annotated[str | None, typer.Option("--dtype", help="The dtype that it will be loaded as.")] = None,
    scaler: Annotated[bool, typer.Option("--scaler", help="It will be trained with a gradient scaler.")] = False,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="It will be sharded with FSDP.")] = False,
    format: FormatOption = TERMINAL,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.", hidden=True)] = False,
) -> int:
    """Count the dtypes of a model's parameters, quantisation states and config, and say what they will run into.

    Weights are not loaded: a checkpoint's headers are read, in milliseconds. Exits 0 if nothing is found, else 10.
    """
    from dtypedoctor.cli.inspecting import subject_of
    from dtypedoctor.diagnosis import preflight
    from dtypedoctor.diagnosis.subject import FLOATS, Intent
    from dtypedoctor.report.inspection import Inspection, inspection_document

    if dtype is not None and dtype not in FLOATS:
        raise UsageError(f"--dtype: {dtype!r} is no dtype to load a model as", f"Known: {', '.join(sorted(FLOATS))}.")
    subject = subject_of(model, Intent(dtype=dtype, scaler=scaler, fsdp=fsdp))
    inspection = Inspection(subject=subject, findings=preflight(subject))
    show(inspection_document(inspection), "json" if as_json else format)
    return int(ExitCode.FINDINGS if inspection.troubled else ExitCode.OK)
