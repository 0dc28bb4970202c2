"""``dtypedoctor inspect``: what a model will run into, before it runs."""

from typing import Annotated

import typer

from dtypedoctor.cli.output import TERMINAL, FormatOption, show
from dtypedoctor.errors import ExitCode, UsageError


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="inspect", epilog="Example:  dtypedoctor inspect ./checkpoint --dtype float16 --scaler")(inspect)


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

    Weights are not loaded: only a checkpoint's headers are read, in milliseconds. Exits 0 if nothing is found, else 10.
    """
    from dtypedoctor.diagnosis import preflight
    from dtypedoctor.diagnosis.subject import FLOATS, Intent
    from dtypedoctor.report.inspection import Inspection, inspection_document
    from dtypedoctor.trials.preflight import subject_of

    if dtype is not None and dtype not in FLOATS:
        raise UsageError(
            f"--dtype: {dtype!r} is not a dtype to load a model in", f"Known: {', '.join(sorted(FLOATS))}."
        )
    subject = subject_of(model, Intent(dtype=dtype, scaler=scaler, fsdp=fsdp))
    inspection = Inspection(subject=subject, findings=preflight(subject))
    show(inspection_document(inspection), "json" if as_json else format)
    return int(ExitCode.FINDINGS if inspection.troubled else ExitCode.OK)
