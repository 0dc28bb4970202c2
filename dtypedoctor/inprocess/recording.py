"""A part of a running program, watched and written up."""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from dtypedoctor.errors import UsageError
from dtypedoctor.interruptions import contained
from dtypedoctor.redaction.redact import without_process_secrets
from dtypedoctor.report.build import build_report
from dtypedoctor.report.files import REPORT_JSON, REPORT_MD, write_report
from dtypedoctor.report.model import Report
from dtypedoctor.runner.directories import job_directory, new_directory, scenario_name
from dtypedoctor.runner.run import WorkerExit, collect
from dtypedoctor.scenario.model import Scenario, ScenarioStep, Script
from dtypedoctor.trace.events import End, NotWatched, Resources, Stage
from dtypedoctor.trace.ranks import header, member, rank_directory
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.trials.treatment import examine
from dtypedoctor.unpatched import getpid, perf_counter, say
from dtypedoctor.worker.elsewhere import Elsewhere
from dtypedoctor.worker.on_import import keep_out_of_compiler
from dtypedoctor.worker.process_watch import ProcessWatch
from dtypedoctor.worker.tracebacks import hide_in_excepthook, hide_own_frames

TRACE = "before"
"""Where the trace lies in the run directory; the same as after ``dtypedoctor exec``."""

_current: "Recording | None" = None


def watched_for() -> Path | None:
    """The run directory of the recording that this process is being watched for; None where it is not."""
    return _current.directory if _current is not None and _current.active else None


def _new_directory(out: Path | None, name: str) -> Path:
    """Where this process records: ``out``, or in a directory of its own in there where it is one of several."""
    here = member()
    if here is not None:
        out = rank_directory(out if out is not None else job_directory(name), here.rank)
    return new_directory(out, name)


class Recording:
    """Watches this process from :meth:`begin` to :meth:`end`, which leaves ``report.json`` and ``report.md``.

    Args:
        out: the run directory to create; ``runs/NAME-TIME`` if left out.
        every: everything is measured in each ``every``-th training step, see :class:`ProcessWatch`.

    Attributes:
        directory: the run directory, from :meth:`begin` on.
        report: what is said at the end; None before.
    """

    def __init__(self, out: Path | None, *, every: int = 1) -> None:
        self._every = every
        self._name = scenario_name(sys.argv[0])
        self._out = out
        self.directory: Path
        self.report: Report | None = None
        self._watch: ProcessWatch | None = None
        self._writer: TraceWriter | None = None
        self._owner = getpid()
        self._elsewhere = Elsewhere()
        self._began = perf_counter()
        self._show_frames: Callable[[], None] = lambda: None

    @property
    def active(self) -> bool:
        """Whether it is watching now, in this process (a forked child has a copy that does nothing)."""
        return self._watch is not None and getpid() == self._owner

    def begin(self, model: nn.Module | None) -> None:
        """Begins to watch; ``model`` gets its name before it is first called.

        Raises:
            UsageError: ``model`` is no module, the directory cannot be used, or this process is being watched already.
        """
        global _current
        _check_module(model)
        if (other := watched_for()) is not None:
            raise UsageError(f"this process is being watched already, for {other}", "End that watch first.")
        self.directory = _new_directory(self._out, self._name)
        trace = self.directory / TRACE
        trace.mkdir()
        writer = self._writer = TraceWriter(trace)
        writer.write(header())
        writer.write(Stage(n=writer.next_n(), index=0, name="watched", workload="script"))
        os.register_at_fork(after_in_child=writer.disown)
        self._elsewhere.begin()
        keep_out_of_compiler(Elsewhere.heard)
        self._watch = ProcessWatch(writer, every=self._every)
        self._watch.start()
        # What ends the program is shown before anybody can tell the watch of it.
        self._show_frames = hide_in_excepthook()
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
        watch, self._watch = self._watch, None
        with contained() as ours:  # no space left, a defect of ours: the program goes on, or its error
            self.report = self._concluded(watch, self._writer, error, note)
        if ours.error is not None:
            say(f"dtypedoctor: no report: {type(ours.error).__name__}: {ours.error}")
        return self.report

    def _concluded(self, watch: ProcessWatch, writer: TraceWriter, error: BaseException | None, note: str) -> Report:
        self._elsewhere.end()
        self._show_frames()
        if error is not None:
            hide_own_frames(error)
        raised = error if not isinstance(error, SystemExit) else None
        if isinstance(error, SystemExit):
            watch.note_exit(error)
        steps = watch.finish(raised, self._elsewhere.libraries)
        for what, why in self._elsewhere.processes():
            writer.write(NotWatched(what=what, why=why))
        if note:
            writer.write(NotWatched(what="the end", why=note))
        seconds = perf_counter() - self._began
        writer.write(Resources(seconds=seconds, peak_memory=watch.peak_memory(), device=watch.device))
        outcome = "completed" if raised is None else "raised"
        writer.write(End(n=writer.next_n(), outcome=outcome, steps_completed=steps))
        writer.close()
        return self._written(WorkerExit(code=_status(error), timed_out=False, seconds=seconds))

    def _written(self, ended: WorkerExit) -> Report:
        run = collect(self.directory / TRACE, ended, foreign=True)
        report = build_report(
            examine(self._scenario(), run),
            command=shlex.join(without_process_secrets(["python", *sys.argv])),
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


def _check_module(model: object) -> None:
    if model is not None and not isinstance(model, nn.Module):
        what = f"{type(model).__module__}.{type(model).__qualname__}"
        hint = "Give the model, or nothing: every module that is called is watched."
        raise UsageError(f"{what} is not a torch.nn.Module", hint)


def _status(error: BaseException | None) -> int:
    """The exit status that the program is about to leave with, as far as ``sys.exit`` says it; 0 else."""
    if not isinstance(error, SystemExit) or error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1
