"""A part of a running program, watched and written up."""

import os
import shlex
import sys
import time
from pathlib import Path

from torch import nn

from dtypedoctor.errors import UsageError
from dtypedoctor.report.build import build_report
from dtypedoctor.report.files import REPORT_JSON, REPORT_MD, write_report
from dtypedoctor.report.model import Report
from dtypedoctor.runner.directories import default_directory, scenario_name
from dtypedoctor.runner.launch import WorkerExit, collect, make_directory
from dtypedoctor.scenario.model import Scenario, ScenarioStep, Script
from dtypedoctor.trace.events import End, Header, NotWatched, Resources, Stage
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.trials.treatment import examine
from dtypedoctor.worker.process_watch import ProcessWatch

TRACE = "before"
"""Where the trace lies in the run directory; the same as after ``dtypedoctor exec``."""

_current: "Recording | None" = None


class Recording:
    """Watches this process from :meth:`begin` to :meth:`end`, which leaves ``report.json`` and ``report.md``.

    Args:
        out: the run directory to create; ``runs/NAME-TIME`` if left out.

    Attributes:
        directory: the run directory.
        report: what is said at the end; None before.
    """

    def __init__(self, out: Path | None) -> None:
        self._name = scenario_name(sys.argv[0])
        self.directory = out if out is not None else default_directory(self._name)
        self.report: Report | None = None
        self._watch: ProcessWatch | None = None
        self._writer: TraceWriter | None = None
        self._owner = os.getpid()
        self._began = time.perf_counter()

    @property
    def active(self) -> bool:
        """Whether it is watching now, in this process (a forked child has a copy that does nothing)."""
        return self._watch is not None and os.getpid() == self._owner

    def begin(self, model: nn.Module | None) -> None:
        """Begins to watch; ``model`` gets its name before it is first called.

        Raises:
            UsageError: the directory cannot be used, or this process is being watched already.
        """
        global _current
        if _current is not None and _current.active:
            raise UsageError(
                f"this process is being watched already, for {_current.directory}", "End that watch first."
            )
        trace = self.directory / TRACE
        make_directory(trace)
        writer = self._writer = TraceWriter(trace)
        writer.write(Header(created=time.time(), pid=self._owner))
        writer.write(Stage(n=writer.next_n(), index=0, name="watched", workload="script"))
        os.register_at_fork(after_in_child=writer.disown)
        self._watch = ProcessWatch(writer)
        self._watch.start()
        if model is not None:
            self._watch.instruments.attach(model)
        _current = self

    def end(self, error: BaseException | None, note: str = "") -> Report | None:
        """Stops watching and writes the report; does nothing where it is not active.

        Args:
            error: what ended the watched part, if anything did.
            note: why its end was not seen, where it was not.
        """
        if not self.active or self._watch is None or self._writer is None:
            return self.report
        watch, writer = self._watch, self._writer
        self._watch = None
        steps = watch.finish(error)
        if note:
            writer.write(NotWatched(what="the end", why=note))
        seconds = time.perf_counter() - self._began
        writer.write(Resources(seconds=seconds, peak_memory=watch.peak_memory(), device=watch.device))
        outcome = "completed" if error is None else "raised"
        writer.write(End(n=writer.next_n(), outcome=outcome, steps_completed=steps))
        writer.close()
        self.report = self._written(seconds)
        return self.report

    def _written(self, seconds: float) -> Report:
        ended = WorkerExit(code=0, timed_out=False, seconds=seconds)
        run = collect(self.directory / TRACE, ended, foreign=True)
        report = build_report(
            examine(self._scenario(), run),
            command=shlex.join(sys.argv),
            files={"report": REPORT_JSON, "markdown": REPORT_MD, "before": TRACE},
            next_command=f"dtypedoctor report {shlex.quote(str(self.directory))}",
        )
        write_report(self.directory, report)
        return report

    def _scenario(self) -> Scenario:
        return Scenario(
            name=self._name,
            summary="A program that was watched from inside.",
            deterministic=False,
            steps=[ScenarioStep(workload=Script(kind="script", path=sys.argv[0] or "-", args=sys.argv[1:]))],
        )
