"""Reads the reports and matrices of run directories; where there is no report, makes one from the trace."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dtypedoctor.errors import UsageError
from dtypedoctor.examination.examine import examine
from dtypedoctor.examination.processes import is_job, open_job
from dtypedoctor.foreign_files import read_file, reason
from dtypedoctor.redaction.redact import without_process_secrets
from dtypedoctor.replay.capsule import read_capsule
from dtypedoctor.report.build import REPORT_JSON, build_report
from dtypedoctor.report.document import (
    Document,
    Section,
    Table,
    Words,
    named,
)
from dtypedoctor.report.run_facts import status_word
from dtypedoctor.report.to_json import Report, from_json
from dtypedoctor.runner.command import OF_A_SCENARIO, Program, is_described
from dtypedoctor.runner.run import Run, SavedRun, open_run
from dtypedoctor.trace.lines import EVENTS
from dtypedoctor.trace.ranks import BEFORE


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


MOST_RUNS = 10


def newest_runs(folder: Path) -> list[tuple[Path, Report]]:
    """The newest runs in a folder that is none itself, such as ``runs``, with their reports; empty where there are none."""
    if not folder.is_dir() or (folder / REPORT_JSON).exists() or is_job(folder):
        return []
    places = [place for place in folder.iterdir() if (place / REPORT_JSON).is_file()]
    newest: list[tuple[Path, Report]] = []
    for place in sorted(places, key=lambda place: (place / REPORT_JSON).stat().st_mtime, reverse=True)[:MOST_RUNS]:
        with suppress(UsageError):  # somebody else's, or of another version
            newest.append((place, read_report(place)))
    return newest


def runs_document(folder: Path, newest: Sequence[tuple[Path, Report]]) -> Document:
    """A list of runs, the newest first."""
    rows = tuple((named(str(place)), Words(status_word(report)), report.headline) for place, report in newest)
    return Document(
        name="runs",
        headline=f"The newest of the runs in {folder}:",
        sections=(Section("", (Table(("run", "status", "headline"), rows),)),),
        next_command=f"dtypedoctor report {shlex.quote(str(newest[0][0]))}",
        data=lambda: {
            "runs": [{"run": str(at), "status": one.status.value, "headline": one.headline} for at, one in newest]
        },
    )


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


def with_typed_paths(report: Report, place: Path) -> Report:
    """Name files of a run directory in its next command as the directory is typed here: a report that was written names no absolute paths."""
    folder = place if place.is_dir() else place.parent
    words = report.next_command.split(" ")
    there = [
        shlex.quote(str(folder / word)) if word and "/" not in word and (folder / word).exists() else word
        for word in words
    ]
    return replace(report, next_command=" ".join(there))


def diagnose(run: str | os.PathLike[str]) -> Report:
    """Read the report of a finished run, or make one of its trace where nobody has: ``dtypedoctor.diagnose("runs/first").findings``.

    Args:
        run: the run directory, or a ``report.json``.

    Raises:
        UsageError: there is no run, or it cannot be read.
        EmptyTraceError: its trace holds nothing.
    """
    return report_of(Path(run))


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
