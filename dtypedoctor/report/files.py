"""Reports on disk."""

import json
from pathlib import Path

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import inside, read_file, read_head, reason
from dtypedoctor.redaction.redact import redact
from dtypedoctor.report.markdown import render_markdown
from dtypedoctor.report.matrix import MatrixRow, read_matrix_json, refused_report
from dtypedoctor.report.model import Report
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
        text = read_file(path, follow=path == place).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = "" if isinstance(error, FileNotFoundError) else f" ({reason(error)})"
        raise UsageError(
            f"{place}: no report here{why}", "Give a directory that `dtypedoctor run`, `exec` or `bisect` has left."
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
        rows = read_matrix_json(read_file(path).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({reason(error)})") from error
    reports = [
        _read_of_matrix(folder, row.report) if row.report is not None else refused_report(row.scenario, row.cause)
        for row in rows
    ]
    return rows, reports


def _read_of_matrix(folder: Path, name: str) -> Report:
    try:
        path = inside(folder, name)
        read_head(path, 1)  # a folder would be searched for a report of its own
    except OSError as error:
        raise UsageError(f"{folder / MATRIX_JSON}: its report {name!r} cannot be read ({reason(error)})") from error
    return read_report(path)


def _replace(path: Path, text: str) -> None:
    """Writes a file as a whole: readers see the old content or the new one, never half of it."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)
