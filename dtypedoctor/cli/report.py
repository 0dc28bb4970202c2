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
    """The formats of ``dtypedoctor.report.renderers``, named here so that ``--help`` need not import them all."""

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
    format: Annotated[Format, typer.Option("--format", "-f", help="What to print.")] = Format.TERMINAL,
) -> None:
    """Print the report of a finished run."""
    from dtypedoctor.cli.console import console_for
    from dtypedoctor.report.files import read_matrix
    from dtypedoctor.report.gallery import with_pictures
    from dtypedoctor.report.renderers import RENDERERS
    from dtypedoctor.report.saved import report_of
    from dtypedoctor.report.terminal import render_terminal

    gc.disable()  # the process ends with the report, and looking for garbage in a long trace takes a fifth of the time
    several = read_matrix(run)
    if several is not None:
        _print_matrix(several, format)
        return
    found = report_of(run)
    if format is Format.TERMINAL:
        render_terminal(found, console_for(sys.stdout))
        return
    if format is Format.HTML:
        found = with_pictures(found, run if run.is_dir() else run.parent)
    _write(RENDERERS[format.value](found))


def _print_matrix(several: "tuple[list[MatrixRow], list[Report]]", format: Format) -> None:
    """Several scenarios as one table or one document."""
    from dtypedoctor.cli.console import console_for
    from dtypedoctor.report.matrix_table import render_matrix
    from dtypedoctor.report.renderers import MERGED

    rows, reports = several
    if format is Format.TERMINAL:
        render_matrix(rows, console_for(sys.stdout))
    elif format.value in MERGED:
        _write(MERGED[format.value](reports))
    else:
        names = ", ".join(row.scenario for row in rows[:4] if row.report is not None)
        raise UsageError(
            f"--format {format.value}: several scenarios have no common report",
            f"Name one of them, e.g. the folder of {names or 'a scenario'}, or use --format {' or '.join(MERGED)}.",
        )


def _write(text: str) -> None:
    trouble = write_document(text)
    if trouble is not None:
        raise UsageError(f"cannot write the report: {os.strerror(trouble.errno or 0)}") from trouble
