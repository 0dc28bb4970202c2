"""``with dtypedoctor.watch(model): …``, and what it shares with the callback: a part of a running program, watched and written up."""

import contextlib
import functools
import html
import inspect
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from rich.console import Console
from torch import nn

from dtypedoctor.diagnosis.rule import Advice
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.capsules import CAPSULE_LIMIT
from dtypedoctor.examination.examine import examine
from dtypedoctor.instrument.budget import budget_of
from dtypedoctor.interruptions import contained, say
from dtypedoctor.plugins import KEEP_FLOAT32
from dtypedoctor.redaction.redact import redact, without_process_secrets
from dtypedoctor.report.build import REPORT_JSON, REPORT_MD, build_report, write_report
from dtypedoctor.report.fixes import replay_command
from dtypedoctor.report.run_document import public_run
from dtypedoctor.report.run_facts import diff_of
from dtypedoctor.report.to_html import render_html
from dtypedoctor.report.to_json import Report
from dtypedoctor.report.to_terminal import print_document
from dtypedoctor.runner.command import OF_A_SCENARIO, Program, scenario_name
from dtypedoctor.runner.directories import RecordFolder, job_directory, new_record
from dtypedoctor.runner.run import WorkerExit, collect
from dtypedoctor.text import one_line, paragraphs
from dtypedoctor.trace.ranks import BEFORE, member, rank_directory
from dtypedoctor.worker.process_watch import ProcessWatch
from dtypedoctor.worker.recording import Recording, hide_in_excepthook, move_when_this_process_ends

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class watch:  # noqa: N801  (used as a function is: `with dtypedoctor.watch(model)`)
    """Watches everything that runs inside of the ``with`` block and leaves a run directory with ``report.json``.

    As a decorator, ``@dtypedoctor.watch()``, it watches each call of the function; the second goes to ``OUT-2``, and so on.
    A call from inside of a recording is a part of that one.

    Every module that is called is watched, also others than ``model``. An exception leaves the block as it was raised.

    Args:
        model: named first, so that dotted names in the report begin at it; may be left out.
        out: run directory to create; ``runs/NAME-TIME`` if left out.
        overhead_budget: share of the time that looks may take after the first steps, e.g. 0.05 (``"auto"``: 1 % on a GPU, 5 % on a CPU); ``"1/16"``
            looks at one of 16 steps, None at all. In the steps between them only the loss and the gradients of each optimizer step are measured.
        replay: make a call that fails again in the process itself, with each operator on record; the failing call is left in ``capsule``
            of the run directory. False makes none again, and the report seldom knows the operator and the edit.

    Attributes:
        directory: the run directory, which is created when the block ends; until then the record is in a private folder elsewhere.
        report: the finished report; None inside of the block.

    Raises:
        dtypedoctor.errors.UsageError: on entering, where ``model`` is no module, the directory exists, or the process is
            being watched already.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        out: str | os.PathLike[str] | None = None,
        overhead_budget: float | str | None = None,
        replay: bool = True,
    ) -> None:
        self._model = model
        self._out = Path(out) if out is not None else None
        self._again = functools.partial(Watched, overhead_budget=overhead_budget, replay=replay)
        self._watched = self._again(self._out)

    def __call__(self, function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        """The function, watched in each of its calls; :attr:`report` and :attr:`directory` are those of the last one.

        Raises:
            UsageError: it is a generator or a coroutine, whose call returns before anything of it has run.
        """
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            what = f"{function.__qualname__} returns before anything of it has run"
            raise UsageError(f"@watch(): {what}", "Put `with dtypedoctor.watch():` inside of it.")
        calls = itertools.count(1)
        model = self._model

        @functools.wraps(function)
        def watched(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            if watched_for() is not None:  # it has called itself, or is called from what is recorded already
                return function(*args, **kwargs)
            self._watched = self._again(numbered(self._out, next(calls)))
            self._model = model
            with self:
                return function(*args, **kwargs)

        return watched

    @property
    def directory(self) -> Path:
        """The run directory, which is created when the block ends."""
        return self._watched.directory

    @property
    def report(self) -> "WatchReport | None":
        """The finished report; None inside of the block."""
        return self._watched.report

    def __enter__(self) -> Self:
        self._watched.begin(self._model)
        self._model = None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._watched.end(error)


class WatchReport(Report):
    """The report of a watched part, as a notebook shows it: redacted, because notebooks are saved and passed on."""

    __slots__ = ()

    def __str__(self) -> str:
        """The headline, a line for each further finding, and below each what to do about it."""
        public = redact(self)
        lines = [f"{public.status}: {one_line(public.headline, 600)}"]
        advice = {one.finding: one for one in reversed(public.do_this)}
        for finding in public.findings:
            if finding.summary != public.headline:
                lines.append(f"{finding.id}: {one_line(finding.summary, 300)}")
            if finding.id in advice:
                lines += [f"  {line}" for line in _advised(advice[finding.id])]
            if finding.fqn and "bfloat16" in finding.remedies:
                lines.append(f'  to try without an edit: dtypedoctor.apply(model, "{KEEP_FLOAT32}:{finding.fqn}")')
        return "\n".join(lines)

    __repr__ = __str__

    def first_lines(self) -> list[str]:
        """The headline and what to do about the first finding; redacted too, since a notebook keeps what is printed, and a job's log."""
        public = redact(self)
        advice = next(iter(public.do_this), None)
        todo = _advised(advice) if advice is not None else ()
        return [one_line(public.headline, 600), *todo]

    def lines(self) -> list[str]:
        """What was found, each finding with its cause, its line and what was measured, for a log."""
        public = redact(self)
        lines = [one_line(public.headline, 600)]
        for finding in public.findings:
            where = f" at {finding.source}" if finding.source else ""
            lines += ["", f"{finding.id} ({finding.confidence}){where}", paragraphs(finding.cause)]
            lines += [f"- {one_line(evidence, 300)}" for evidence in finding.evidence[:5]]
            lines.append(f"What to change: dtypedoctor explain {finding.id}")
        return lines

    def _repr_html_(self) -> str:
        """The whole report in a frame of its own, so that its style and the notebook's do not meet."""
        page = html.escape(render_html(public_run(self)))
        looks = 'title="dtypedoctor report" sandbox="allow-scripts" style="width:100%;height:36em;border:0"'
        return f'<iframe srcdoc="{page}" {looks}></iframe>'

    def show(self) -> None:
        """Prints the report as ``dtypedoctor report`` does."""
        print_document(public_run(self), Console())


def _advised(advice: Advice) -> Iterator[str]:
    yield f"do this: {one_line(advice.text, 300)}"
    changed = diff_of(advice.edits) if advice.edits else advice.code
    yield from (f"  {line}" for line in changed.splitlines())


def numbered(out: Path | None, call: int) -> Path | None:
    """The run directory of one of several parts: ``OUT``, ``OUT-2``, ``OUT-3``, …; None where none is named."""
    return out.with_name(f"{out.name}-{call}") if out is not None and call > 1 else out


_NOTEBOOK = "notebook"
"""The name of what runs in a notebook's kernel, whose command line nobody can repeat."""
_current: "Watched | None" = None


def watched_for() -> Path | None:
    """The run directory that this process is being watched for; None where it is not."""
    return _current.directory if _current is not None and _current.active else None


class Watched:
    """Records this process from :meth:`begin` to :meth:`end`, which leaves ``report.json`` and ``report.md``.

    Args:
        out: the run directory to create; ``runs/NAME-TIME`` if left out.
        overhead_budget: share of the time that measuring may take, see :class:`watch`.
        replay: replay what fails, see :class:`watch`.
        quiet: nothing is printed at the end.

    Attributes:
        directory: the run directory, from :meth:`begin` on.
        report: what is said at the end; None before.
    """

    def __init__(
        self,
        out: Path | None,
        *,
        overhead_budget: float | str | None = None,
        replay: bool = False,
        quiet: bool = False,
    ) -> None:
        self._budget = budget_of(overhead_budget)
        self._say = (lambda text: None) if quiet else say
        self._replay = replay
        self._name = _NOTEBOOK if "ipykernel" in sys.modules else scenario_name(sys.argv[0])
        self._out = out
        self.directory: Path
        self._folder: RecordFolder
        self.report: WatchReport | None = None
        self._recording: Recording | None = None
        self._show_frames: Callable[[], None] = lambda: None

    @property
    def active(self) -> bool:
        """Whether it is watching now, in this process (a forked child has a copy that does nothing)."""
        return self._recording is not None and self._recording.active

    def begin(self, model: nn.Module | None) -> None:
        """Begins to watch; ``model`` gets its name before it is first called.

        Raises:
            UsageError: ``model`` is no module, the directory cannot be used, or this process is being watched already.
        """
        global _current
        given: object = model
        if given is not None and not isinstance(given, nn.Module):
            what = f"{type(given).__module__}.{type(given).__qualname__}"
            hint = "Pass the model, or nothing: every module that is called is instrumented."
            raise UsageError(f"{what} is not a torch.nn.Module", hint)
        if (other := watched_for()) is not None:
            raise UsageError(f"this process is already recorded in {other}", "Stop that recording first.")
        # where this process records: ``out``, or in a directory of its own in there where it is one of several
        out = self._out
        here = member()
        if here is not None:
            out = rank_directory(out if out is not None else job_directory(self._name), here.rank)
        self._folder = new_record(out, self._name, Path(sys.argv[0]).resolve().parent)
        self.directory = self._folder.directory
        trace = self._folder.private / BEFORE
        trace.mkdir()
        with contextlib.suppress(OSError):  # of a program that is killed the record stays where it is then
            move_when_this_process_ends(str(self._folder.private), str(self.directory.absolute()))
        self._recording = Recording(trace)
        self._recording.follow_program("watched")
        process = ProcessWatch(self._recording.writer, budget=self._budget)
        self._recording.torch_is_there(process)
        process.start()
        if self._replay:
            process.instruments.replay_failures()
        # What ends the program is shown before anybody can tell the watch of it.
        self._show_frames = hide_in_excepthook()
        if model is not None:
            process.instruments.attach(model)
        _current = self

    def end(self, error: BaseException | None, note: str = "") -> None:
        """Stops watching, writes the report and says where; does nothing where it is not active.

        Args:
            error: what ended the watched part, if anything did.
            note: why its end was not seen, where it was not.
        """
        recording = self._recording
        if recording is None or not recording.active:
            return
        self._recording = None
        with contained() as ours:  # no space left, a defect of ours: the program goes on, or its error
            self._show_frames()
            recording.end(error, [("the end", note)] if note else ())
            self.report = self._written(WorkerExit(code=_status(error), timed_out=False, seconds=recording.seconds))
        with contained():
            self._folder.arrive()
            self.directory = self._folder.directory
        if ours.error is not None:
            self._say(f"dtypedoctor: no report: {type(ours.error).__name__}: {ours.error}")
        if self.report is not None:
            lines = [*self.report.first_lines(), f"report in {self.directory}"]
            self._say("\n".join(f"dtypedoctor: {line}" for line in lines))
            if "directory" in (self.report.capsule or {}):
                self._say(f"dtypedoctor: failing call: {replay_command(self.report, shlex.quote(str(self.directory)))}")

    def _written(self, ended: WorkerExit) -> WatchReport:
        private = self._folder.private
        run = collect(private / BEFORE, ended, foreign=True)
        program = Program(
            name=self._name,
            summary="A program that instruments itself.",
            path=sys.argv[0] or "-",
            args=sys.argv[1:],
            time_limit=OF_A_SCENARIO,
        )
        treatment = examine(program.described(), run, capsule_limit=CAPSULE_LIMIT if self._replay else None)
        self._folder.reserve()
        self.directory = self._folder.directory
        built = build_report(
            treatment,
            command="" if self._name == _NOTEBOOK else shlex.join(without_process_secrets(["python", *sys.argv])),
            files={"report": REPORT_JSON, "markdown": REPORT_MD, "before": BEFORE},
            next_command=f"dtypedoctor report {shlex.quote(str(self.directory))}",
        )
        write_report(private, built)
        return WatchReport(**{each.name: getattr(built, each.name) for each in fields(built)})


class Trainings:
    """Watches one training after the other, each into a run directory of its own: what the callbacks of trainers have in common.

    Args:
        out: run directory to create; ``runs/NAME-TIME`` if left out. Later trainings go to ``OUT-2``, ``OUT-3``, …
        overhead_budget, replay: see :class:`watch`.

    Attributes:
        report: what was said at the end of the last training; None before.
    """

    def __init__(
        self,
        out: str | os.PathLike[str] | None = None,
        *,
        overhead_budget: float | str | None = None,
        replay: bool = True,
    ) -> None:
        self._out = Path(out) if out is not None else None
        self._again = functools.partial(Watched, overhead_budget=overhead_budget, replay=replay)
        self._trainings = 0
        self._watched: Watched | None = None
        self.report: WatchReport | None = None

    def _begin(self, model: nn.Module | None) -> None:
        """A training begins. One that runs while the process is being watched already is part of that report and gets none of its own."""
        if (other := watched_for()) is not None:
            say(f"dtypedoctor: this training is already recorded in {other}")
            return
        self._trainings += 1
        self._watched = self._again(numbered(self._out, self._trainings))
        self._watched.begin(model)

    def _end(self, error: BaseException | None, note: str = "") -> None:
        """It has ended; does nothing where it is not watched."""
        watched, self._watched = self._watched, None
        if watched is not None and watched.active:
            watched.end(error, note)
            self.report = watched.report


def _status(error: BaseException | None) -> int:
    """The exit status that the program is about to leave with, as far as ``sys.exit`` says it; 0 else."""
    if not isinstance(error, SystemExit) or error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1
