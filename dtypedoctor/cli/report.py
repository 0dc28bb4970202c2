"""``dtypedoctor report``: a finished run's report, in any format."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dtypedoctor.errors import UsageError


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
    run: Annotated[Path, typer.Argument(help="Directory that a run has left, or its report.json.", metavar="RUN")],
    format: Annotated[Format, typer.Option("--format", "-f", help="What to print.")] = Format.TERMINAL,
) -> None:
    """Print the report of a finished run."""
    from dtypedoctor.cli.console import console_for
    from dtypedoctor.report.files import read_report
    from dtypedoctor.report.gallery import with_pictures
    from dtypedoctor.report.renderers import RENDERERS
    from dtypedoctor.report.terminal import render_terminal

    found = read_report(run)
    if format is Format.TERMINAL:
        render_terminal(found, console_for(sys.stdout))
        return
    if format is Format.HTML:
        found = with_pictures(found, run if run.is_dir() else run.parent)
    text = RENDERERS[format.value](found)
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise UsageError(f"cannot write the report: {os.strerror(error.errno or 0)}") from error
