"""``dtypedoctor report``: a finished run's report, in any format."""

import gc
from pathlib import Path
from typing import Annotated

import typer

from dtypedoctor.cli.output import TERMINAL, FormatOption, show, shows_runs


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="report", epilog="Example:  dtypedoctor report runs/gemma4_grpo_fp16-... --format md > ticket.md")(
        report
    )


def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="Run directory, of one run or of several scenarios, or a report.json.",
            metavar="RUN",
        ),
    ],
    format: FormatOption = TERMINAL,
) -> None:
    """Print the report of a finished run."""
    from dtypedoctor.cli.running import matrix_exit
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.files import read_matrix, report_of, with_pictures
    from dtypedoctor.report.matrix import matrix_document
    from dtypedoctor.report.run_document import run_document

    gc.disable()  # the process ends with the report, and looking for garbage in a long trace takes a fifth of the time
    several = read_matrix(run)
    if several is not None:
        rows, reports = several
        shown = reports if format == TERMINAL else list(map(redact, reports))
        show(matrix_document(rows, shown, exit_code=matrix_exit(rows)), format)
        return
    found = report_of(run)
    if shows_runs(format):
        found = with_pictures(found, run if run.is_dir() else run.parent)
    show(run_document(found if format == TERMINAL else redact(found)), format)
