"""``--format``: the prompt, or one of the formats that documents are written in."""

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dtypedoctor.errors import UsageError

if TYPE_CHECKING:
    from dtypedoctor.report.document import Document

__all__ = ["TERMINAL", "FormatOption", "show", "shows_runs"]

TERMINAL = "terminal"
_COME_WITH_IT = (TERMINAL, "md", "html", "json", "junit", "github")
"""The formats that come with the program, named here so that ``--help`` need not import them; a test compares."""


def _known(name: str) -> str:
    """``name`` if there is such a format: a typing error is told before anything has run."""
    if name != TERMINAL:
        from dtypedoctor.report.formats import format_named

        format_named(name)
    return name


FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        "-f",
        help="What to print: one of these, or the name of a plug-in's format.",
        metavar=f"[{'|'.join(_COME_WITH_IT)}]",
        autocompletion=lambda: list(_COME_WITH_IT),
        callback=_known,
    ),
]


def show(document: "Document", format: str) -> None:
    """Prints ``document`` in a format; except at the prompt, its texts must be redacted.

    Raises:
        UsageError: there is no such format, or standard output cannot be written.
    """
    if format == TERMINAL:
        from dtypedoctor.cli.console import console_for
        from dtypedoctor.report.to_terminal import print_document

        print_document(document, console_for(sys.stdout))
        return
    from dtypedoctor.cli.standard_streams import write_document
    from dtypedoctor.report.formats import format_named

    trouble = write_document(format_named(format).render(document))
    if trouble is not None:
        raise UsageError(f"cannot write the report: {os.strerror(trouble.errno or 0)}") from trouble


def shows_runs(format: str) -> bool:
    """Whether a format shows what the traces of the runs hold."""
    if format == TERMINAL:
        return False
    from dtypedoctor.report.formats import format_named

    return format_named(format).shows_runs
