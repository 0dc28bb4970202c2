"""``dtypedoctor report``: a finished run's report, in any format."""

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dtypedoctor.cli.console import console_for
from dtypedoctor.errors import UsageError
from dtypedoctor.report.files import read_report
from dtypedoctor.report.gallery import with_pictures
from dtypedoctor.report.renderers import RENDERERS
from dtypedoctor.report.terminal import render_terminal

Format = StrEnum("Format", {name: name for name in ("terminal", *RENDERERS)})  # type: ignore[misc]
TERMINAL = Format("terminal")


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="report", epilog="Example:  dtypedoctor report runs/gemma4_grpo_fp16-... --format md > ticket.md")(
        report
    )


def report(
    run: Annotated[Path, typer.Argument(help="Directory that a run has left, or its report.json.", metavar="RUN")],
    format: Annotated[Format, typer.Option("--format", "-f", help="What to print.")] = TERMINAL,
) -> None:
    """Print the report of a finished run."""
    found = read_report(run)
    if format == "terminal":
        render_terminal(found, console_for(sys.stdout))
        return
    if format == "html":
        found = with_pictures(found, run if run.is_dir() else run.parent)
    text = RENDERERS[str(format)](found)
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise UsageError(f"cannot write the report: {os.strerror(error.errno or 0)}") from error
