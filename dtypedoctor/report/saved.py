"""The report of a run that lies on disk, whether or not somebody lived to write it."""

import shlex
import sys
from pathlib import Path

from pydantic import ValidationError

from dtypedoctor.errors import UsageError
from dtypedoctor.redaction.redact import without_process_secrets
from dtypedoctor.report.build import build_report
from dtypedoctor.report.files import REPORT_JSON, read_report
from dtypedoctor.report.model import Report
from dtypedoctor.runner.saved import BEFORE, SavedRun, open_run
from dtypedoctor.scenario.model import Scenario, ScenarioStep, Script
from dtypedoctor.trace.writer import EVENTS
from dtypedoctor.trials.job import is_job, open_job
from dtypedoctor.trials.treatment import examine

__all__ = ["report_of"]


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


def _examined(saved: SavedRun, place: Path) -> Report:
    return build_report(
        examine(_scenario(saved, place), saved.run),
        command=shlex.join(without_process_secrets(["dtypedoctor", *sys.argv[1:]])),
        files={"before": BEFORE} if (place / BEFORE).is_dir() else {},
        next_command=f"dtypedoctor report {shlex.quote(str(place))} --format md",
    )


def _scenario(saved: SavedRun, place: Path) -> Scenario:
    """What was run, or what stands for a program of which nothing is known."""
    try:
        return Scenario.model_validate(saved.request["scenario"])
    except (KeyError, ValidationError):
        return Scenario(
            name="a-run-without-a-report",
            summary="A program that was watched and did not come to its end.",
            deterministic=False,
            steps=[ScenarioStep(workload=Script(kind="script", path=str(place)))],
        )
