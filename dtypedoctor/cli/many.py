"""Several scenarios in one command: each in a folder of its own, and a matrix of all of them."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dtypedoctor.cli.endings import exit_code
from dtypedoctor.cli.live import LiveView
from dtypedoctor.cli.scenario_files import load_checked
from dtypedoctor.cli.treating import treat_scenario
from dtypedoctor.errors import DoctorError, ExitCode, UsageError
from dtypedoctor.redaction.redact import redact
from dtypedoctor.report.files import MATRIX_JSON, REPORT_JSON
from dtypedoctor.report.matrix import (
    MatrixRow,
    in_one_line,
    refused_report,
    refused_row,
    render_matrix_json,
    row_of,
)
from dtypedoctor.report.model import Report
from dtypedoctor.runner.directories import new_directory
from dtypedoctor.scenario.loading import resolve
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.trials.treatment import Plan

_GRAVEST_FIRST = (ExitCode.INTERNAL, ExitCode.USAGE, ExitCode.NO_TRACE, ExitCode.FINDINGS)


def load_all(texts: Sequence[str], *, allow_code: bool) -> list[Scenario]:
    """The scenarios that a person names, in that order; those of a folder by name, each file once.

    Raises:
        UsageError: something cannot be read, a folder holds none, two files have the same name, or a stranger's scenario names
            code and ``allow_code`` is not set.
    """
    paths = {path.resolve(): path for text in texts for path in _paths(text)}
    loaded = [load_checked(path, allow_code=allow_code) for path in paths.values()]
    twice = [name for name, times in Counter(scenario.name for scenario in loaded).items() if times > 1]
    if twice:
        raise UsageError(f"{', '.join(twice)}: two files of this name", "Each scenario gets a folder of its name.")
    return loaded


def _paths(text: str) -> list[Path]:
    folder = Path(text)
    if not folder.is_dir():
        return [resolve(text)]
    found = sorted(folder.glob("*.yaml"))
    if not found:
        raise UsageError(f"{text}: no scenarios here", "A scenario is a file that ends in .yaml.")
    return found


def treat_all(scenarios: Sequence[Scenario], directory: Path, plan: Plan) -> tuple[list[MatrixRow], list[Report]]:
    """Treats each scenario in a folder of its name in ``directory``, which is new, and leaves the matrix there.

    A scenario that cannot be run at all is a row of the matrix like any other; the rest is run all the same.

    Returns:
        The rows, and the reports in the same order.
    """
    rows: list[MatrixRow] = []
    reports: list[Report] = []
    for scenario in scenarios:
        view = LiveView(sys.stderr, every_run=False)
        row, report = _treated(scenario, directory, plan, view)
        rows.append(row)
        reports.append(report)
        view.say(f"{len(rows)}/{len(scenarios)} {in_one_line(rows[-1])}")
    try:
        (directory / MATRIX_JSON).write_text(render_matrix_json(rows, exit_code=matrix_exit(rows)), encoding="utf-8")
        print(f"Matrix: {directory / MATRIX_JSON}", file=sys.stderr)
    except OSError as error:  # the disk is full, or the directory is gone: it can still be shown
        print(f"dtypedoctor: the matrix cannot be kept in {directory}: {error.strerror}", file=sys.stderr)
    return rows, reports


def _treated(scenario: Scenario, directory: Path, plan: Plan, view: LiveView) -> tuple[MatrixRow, Report]:
    began = time.monotonic()
    try:
        report = treat_scenario(scenario, new_directory(directory / scenario.name, scenario.name), plan, view)
    except DoctorError as refused:
        row = refused_row(scenario.name, refused.message, exit_code=int(refused.exit_code))
        return row, refused_report(scenario.name, refused.message)
    seconds = round(time.monotonic() - began, 2)
    path = f"{scenario.name}/{REPORT_JSON}"
    return row_of(redact(report), exit_code=exit_code(report), seconds=seconds, path=path), report


def matrix_exit(rows: Sequence[MatrixRow]) -> int:
    """0 if each scenario's exit code is 0; else the code of the gravest: usage, then a dead worker, then findings."""
    codes = {row.exit for row in rows}
    return next((int(code) for code in _GRAVEST_FIRST if int(code) in codes), int(ExitCode.OK))
