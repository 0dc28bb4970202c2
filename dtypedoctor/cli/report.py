"""``dtypedoctor report``: a finished run's report, in any format."""

import gc
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtypedoctor.cli.standard_streams import write_document
from dtypedoctor.errors import UsageError

if TYPE_CHECKING:
    from dtypedoctor.report.matrix import MatrixRow
    from dtypedoctor.report.model import Report


class Format(StrEnum):
    """The formats that come with dtypedoctor, named here so that ``--help`` need not import them all."""

    TERMINAL = "terminal"
    MD = "md"
    HTML = "html"
    JSON = "json"
    JUNIT = "junit"
    GITHUB = "github"


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="report", epilog="Example:  dtypedoctor report runs/gemma4_grpo_fp16-... --format md > ticket.md")(
        report
    )


def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="Directory that a run or several scenarios have left, or a report.json.",
            metavar="RUN",
        ),
    ],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            metavar=f"[{'|'.join(Format)}]",
            autocompletion=lambda: list(Format),
            help="What to print: one of these, or the name of a plug-in's format.",
        ),
    ] = Format.TERMINAL,
) -> None:
    """Print the report of a finished run."""
    from dtypedoctor.cli.console import console_for
    from dtypedoctor.report.files import read_matrix
    from dtypedoctor.report.gallery import with_pictures
    from dtypedoctor.report.renderers import renderer_of
    from dtypedoctor.report.saved import report_of
    from dtypedoctor.report.terminal import render_terminal

    gc.disable()  # the process ends with the report, and looking for garbage in a long trace takes a fifth of the time
    several = read_matrix(run)
    if several is not None:
        _print_matrix(several, format)
        return
    found = report_of(run)
    if format == Format.TERMINAL:
        render_terminal(found, console_for(sys.stdout))
        return
    if format == Format.HTML:
        found = with_pictures(found, run if run.is_dir() else run.parent)
    _write(renderer_of(format)(found))


def _print_matrix(several: "tuple[list[MatrixRow], list[Report]]", format: str) -> None:
    """Several scenarios as one table or one document."""
    from dtypedoctor.cli.console import console_for
    from dtypedoctor.report.matrix_table import render_matrix
    from dtypedoctor.report.renderers import merger_of

    rows, reports = several
    if format == Format.TERMINAL:
        render_matrix(rows, console_for(sys.stdout))
    else:
        _write(merger_of(format)(reports))


def _write(text: str) -> None:
    trouble = write_document(text)
    if trouble is not None:
        raise UsageError(f"cannot write the report: {os.strerror(trouble.errno or 0)}") from trouble
