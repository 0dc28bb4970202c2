"""Reads the reports and matrices of run directories; where there is no report, makes one from the trace."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from dtypedoctor.errors import UsageError
from dtypedoctor.examination.examine import examine
from dtypedoctor.examination.processes import is_job, open_job
from dtypedoctor.foreign_files import inside, read_file, read_head, reason
from dtypedoctor.redaction.redact import without_process_secrets
from dtypedoctor.replay.capsule import read_capsule
from dtypedoctor.report.build import REPORT_JSON, build_report
from dtypedoctor.report.matrix import MatrixRow, read_matrix_json, refused_report
from dtypedoctor.report.to_json import Report, from_json
from dtypedoctor.runner.command import OF_A_SCENARIO, Program, is_described
from dtypedoctor.runner.run import Run, SavedRun, open_run
from dtypedoctor.trace.lines import EVENTS
from dtypedoctor.trace.ranks import BEFORE

MATRIX_JSON = "matrix.json"


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
    reports = []
    for row in rows:
        if row.report is None:
            reports.append(refused_report(row.scenario, row.cause))
            continue
        try:
            report = inside(folder, row.report)
            read_head(report, 1)  # a folder would be searched for a report of its own
        except OSError as error:
            raise UsageError(f"{path}: its report {row.report!r} cannot be read ({reason(error)})") from error
        reports.append(read_report(report))
    return rows, reports


def report_of_machines(places: Sequence[Path], *, own_files: bool = False) -> Report:
    """The report on one job that several machines have recorded in ``places``, or in one folder that all of them have, from their traces.

    Args:
        places: where the ranks lie.
        own_files: see :func:`dtypedoctor.examination.examine.examine`.

    Raises:
        UsageError: there are none, they cannot be read, or they are not of one job.
    """
    return _examined(open_job(*places), *places, own_files=own_files)


def report_of(place: Path) -> Report:
    """The report in ``place``; where there is none but a trace, what the trace says.

    A doctor that is ended together with the run that it watches (by the out-of-memory killer, say, or because the program
    watches itself) leaves a trace and no report.

    Raises:
        UsageError: there is neither, or it cannot be read.
        EmptyTraceError: there is a trace that holds nothing.
    """
    try:
        return read_report(place)
    except UsageError:
        if (place / REPORT_JSON).exists():
            raise
        if is_job(place):
            return _examined(open_job(place), place)
        if not any((part / EVENTS).is_file() for part in (place, place / BEFORE)):
            raise
    return _examined(open_run(place), place)


def _examined(saved: SavedRun, place: Path, *more: Path, own_files: bool = False) -> Report:
    places = shlex.join(map(str, (place, *more)))
    ran = saved.request.get("scenario")
    if not is_described(ran):  # nothing is known of the program
        ran = Program(name="a-run-without-a-report", path=str(place), time_limit=OF_A_SCENARIO).described()
    return build_report(
        examine(ran, saved.run, own_files=own_files),
        command=shlex.join(without_process_secrets(["dtypedoctor", *sys.argv[1:]])),
        files={"before": BEFORE} if (place / BEFORE).is_dir() else {},
        next_command=_replay_of(saved.run) or f"dtypedoctor report {places} --format md",
    )


def _replay_of(run: Run) -> str:
    """What tries fixes on the failing call of a rank, where its machine has kept it; empty where there is none."""
    for place in run.directory.parents[:2] if run.ranks else ():
        try:
            capsule = read_capsule(place)
            option = " --allow-code" if any(capsule.code()) else ""
        except UsageError:
            continue
        return f"dtypedoctor replay {shlex.quote(str(capsule.directory))}{option}"
    return ""
