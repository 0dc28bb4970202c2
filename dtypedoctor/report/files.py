"""Reports on disk."""

import json
from pathlib import Path

from dtypedoctor.errors import UsageError
from dtypedoctor.report.markdown import render_markdown
from dtypedoctor.report.matrix import MatrixRow, read_matrix_json, refused_report
from dtypedoctor.report.model import Report
from dtypedoctor.report.redaction import redact
from dtypedoctor.report.to_json import from_json, render_json

REPORT_JSON = "report.json"
REPORT_MD = "report.md"
MATRIX_JSON = "matrix.json"


def write_report(directory: Path, report: Report) -> None:
    """Writes ``report.json`` and ``report.md`` into ``directory``.

    Reports are attached to public tickets, so private strings are replaced first; ``report`` itself, for the person at
    the prompt, keeps them.
    """
    public = redact(report)
    _replace(directory / REPORT_JSON, render_json(public))
    _replace(directory / REPORT_MD, render_markdown(public))


def read_report(place: Path) -> Report:
    """Reads the report that a run has left in ``place`` (the directory or the file itself).

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    path = place / REPORT_JSON if place.is_dir() else place
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{place}: no report here", "Give a directory that `dtypedoctor run`, `exec` or `bisect` has left."
        ) from error
    try:
        return from_json(text)
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: not a report of dtypedoctor ({error})") from error


def read_matrix(folder: Path) -> tuple[list[MatrixRow], list[Report]] | None:
    """The matrix that several scenarios have left in ``folder``, and their reports in its order; None where there is none.

    Raises:
        UsageError: it, or a report that it names, cannot be read.
    """
    path = folder / MATRIX_JSON
    if not path.is_file():
        return None
    try:
        rows = read_matrix_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from error
    reports = [
        read_report(folder / row.report) if row.report is not None else refused_report(row.scenario, row.cause)
        for row in rows
    ]
    return rows, reports


def _replace(path: Path, text: str) -> None:
    """Writes a file as a whole: readers see the old content or the new one, never half of it."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
