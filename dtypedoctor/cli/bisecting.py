"""What ``bisect`` does once its arguments are read. It is imported only then: ``--help`` must not wait for it."""

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dtypedoctor.analysis import ending_of
from dtypedoctor.cli.bisect_case import Case
from dtypedoctor.cli.foreign_code import resume_command
from dtypedoctor.cli.narrowing import Narrowing
from dtypedoctor.cli.treating import kept
from dtypedoctor.errors import UsageError
from dtypedoctor.redaction.redact import without_process_secrets
from dtypedoctor.report.build import bisection_report
from dtypedoctor.report.files import REPORT_JSON, REPORT_MD
from dtypedoctor.report.model import Report
from dtypedoctor.runner.directories import clear, remove_unused
from dtypedoctor.runner.launch import Launcher, WarmServer
from dtypedoctor.runner.machine import gpu_environment, visible_gpus
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.request import Request
from dtypedoctor.trials.bisection.bisect import Bisection, End, Told, bisect
from dtypedoctor.trials.bisection.laboratory import JOURNAL, Journal, Laboratory
from dtypedoctor.trials.bisection.questions import Measured

__all__ = ["bisect_case"]

MOST_JOBS = 4
"""Runs at a time where nobody says: each holds a model of its own."""


def bisect_case(case: Case, jobs: int | None) -> Report:
    """Bisects ``case`` and leaves the report in its directory.

    Raises:
        UsageError: it cannot be run at all; a new directory is not left behind.
        WorkerDiedError: the worker died before there was a model.
    """
    with _kept_only_if_used(case), Narrowing(sys.stderr) as view, _laboratory(case, jobs, view) as lab:
        journal = Journal(case.directory)

        def probe(measured: Measured) -> None:
            view.probe(measured)
            if not measured.repeated and not measured.probe.cached:
                journal.note(
                    "probe",
                    question=measured.question,
                    stage=measured.probe.stage,
                    treated=list(measured.names),
                    outcome=measured.probe.outcome,
                    reason=measured.symptom.reason,
                    absmax=measured.symptom.absmax,
                    seconds=round(measured.symptom.seconds, 3),
                )

        told = Told(stage=view.stage, forest=view.forest, probe=probe)
        found = bisect(case.asked.scenario, lab, told, case.asked.tolerance)
    return _reported(found, case.directory)


@contextmanager
def _kept_only_if_used(case: Case) -> Iterator[None]:
    try:
        yield
    except UsageError:
        if not case.resumed:
            remove_unused(case.directory)
        raise
    except (KeyboardInterrupt, OSError):
        print(f"Go on with: {resume_command(case.directory)}", file=sys.stderr)
        raise


@contextmanager
def _laboratory(case: Case, jobs: int | None, view: Narrowing) -> Iterator[Laboratory]:
    """Runs requests in workers forked from a server that has the models built; on GPUs each worker gets one for itself."""
    directory, gpus = case.directory, visible_gpus()
    journal = Journal(directory)
    server = directory / "server"
    clear(server)  # that of an interrupted bisection
    view.stage("building the model")
    with (
        Launcher(directory / "server.log") as launcher,
        WarmServer(launcher, Request(scenario=case.asked.scenario), server) as warm,
    ):
        on_gpu = warm.device == "cuda"

        def note(place: str, run: Run | UsageError) -> None:
            journal.note("run", place=place, ended=run.message if isinstance(run, UsageError) else ending_of(run).words)

        yield Laboratory(
            directory,
            lambda request, place, slot: warm.start(request, place, gpu_environment(slot, gpus) if on_gpu else {}),
            jobs or (max(1, len(gpus)) if on_gpu else min(len(os.sched_getaffinity(0)), MOST_JOBS)),
            tick=view.tick,
            note=note,
        )


def _reported(found: Bisection, directory: Path) -> Report:
    files = {"report": REPORT_JSON, "markdown": REPORT_MD, "before": "before", "journal": JOURNAL, "log": "server.log"}
    if found.reproduction is not None and found.reproduction.script is not None:
        files["reproduction"] = found.reproduction.script
    report = bisection_report(
        found,
        command=shlex.join(without_process_secrets(["dtypedoctor", *sys.argv[1:]])),
        files=files,
        next_command=_next_command(found, directory),
    )
    return kept(directory, report)


def _next_command(found: Bisection, directory: Path) -> str:
    if found.end is End.INTERRUPTED:
        return resume_command(directory)
    return f"dtypedoctor report {shlex.quote(str(directory))} --format md"
