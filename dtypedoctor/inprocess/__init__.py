"""``with dtypedoctor.watch(model): …``, and what it shares with the callback: a part of a running program, watched and written up."""

import contextlib
import functools
import html
import inspect
import itertools
import os
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from rich.console import Console
from torch import nn

from dtypedoctor.diagnosis.rule import Advice, Finding
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.capsules import CAPSULE_LIMIT
from dtypedoctor.examination.examine import examine
from dtypedoctor.instrument.budget import budget_of
from dtypedoctor.interruptions import contained, say
from dtypedoctor.plugins import KEEP_FLOAT32
from dtypedoctor.redaction.redact import redact, without_process_secrets
from dtypedoctor.report.advice import diff_of
from dtypedoctor.report.build import REPORT_JSON, REPORT_MD, build_report, write_report
from dtypedoctor.report.fixes import replay_command
from dtypedoctor.report.model import Report
from dtypedoctor.report.run_document import public_run
from dtypedoctor.report.to_html import render_html
from dtypedoctor.report.to_terminal import print_document
from dtypedoctor.runner.command import OF_A_SCENARIO, Program, scenario_name
from dtypedoctor.runner.directories import RecordFolder, job_directory, new_record
from dtypedoctor.runner.run import WorkerExit, collect
from dtypedoctor.text import one_line, paragraphs
from dtypedoctor.trace.events import Observed, Site
from dtypedoctor.trace.ranks import BEFORE, member, rank_directory
from dtypedoctor.trace.records.silent import GradientZeros, ScaledBackward, Updates
from dtypedoctor.trace.writer import SampleRow
from dtypedoctor.worker.process_watch import ProcessWatch
from dtypedoctor.worker.recording import Recording, hide_in_excepthook, move_when_this_process_ends

PREFIX = "dtypedoctor"
MOST_NAMED = 8
"""Modules, or parameters, that each statistic names; the first that are the worst at some time stay."""

_LANES = {"output": "activations", "grad_output": "gradients", "grad": "gradients"}


class Statistics:
    """Hears the records of a :class:`~dtypedoctor.trace.writer.TraceWriter`, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: dict[int, Site] = {}
        self._largest: dict[int, float] = {}
        self._bad: dict[int, int] = {}
        self._shares: dict[str, dict[str, float]] = {}
        self._totals: dict[str, float] = {}
        self._named: dict[str, set[str]] = {}

    def record(self, record: Any) -> None:
        """One record that is no sample."""
        if isinstance(record, Site):
            if record.kind in _LANES:
                self._sites[record.id] = record
        elif isinstance(record, Observed):
            with self._lock:
                what = record.what
                if isinstance(what, GradientZeros):
                    self._underflow({name: (seen.zeros, seen.elements) for name, seen in what.parameters.items()})
                elif isinstance(what, ScaledBackward):
                    self._underflow(
                        {
                            name: (seen.zeros - seen.zeros_scaled, seen.elements)
                            for name, seen in what.parameters.items()
                        }
                    )
                elif isinstance(what, Updates) and what.wanted:
                    self._lost(what)

    def rows(self, rows: Sequence[SampleRow]) -> None:
        """Some samples."""
        with self._lock:
            for site, absmax, num_nan, num_inf in rows:
                if absmax > self._largest.get(site, -1.0):
                    self._largest[site] = absmax
                if num_nan or num_inf:
                    self._bad[site] = self._bad.get(site, 0) + num_nan + num_inf

    def take(self) -> dict[str, float]:
        """The scalars since this was asked last, by name: a total of each statistic, and the worst modules or parameters."""
        with self._lock:
            largest, self._largest = self._largest, {}
            bad, self._bad = self._bad, {}
            shares, self._shares = self._shares, {}
            totals, self._totals = self._totals, {}
        found: dict[str, float] = {}
        for lane in ("activations", "gradients"):
            percents = _by_module(self._percents(largest, lane), max)
            if percents:
                found[f"{PREFIX}/{lane}/percent_of_max/largest"] = max(percents.values())
                found |= self._worst(f"{lane}/percent_of_max", percents)
            counts = _by_module(((self._sites[s].fqn, float(n)) for s, n in bad.items() if self._is(s, lane)), sum)
            if percents or counts:
                found[f"{PREFIX}/{lane}/nonfinite/total"] = float(sum(counts.values()))
                found |= self._worst(f"{lane}/nonfinite", counts)
        found |= {f"{PREFIX}/{name}/total": value for name, value in totals.items()}
        for name, values in shares.items():
            found |= self._worst(name, values)
        return found

    def _is(self, site: int, lane: str) -> bool:
        return site in self._sites and _LANES[self._sites[site].kind] == lane

    def _percents(self, largest: Mapping[int, float], lane: str) -> Iterator[tuple[str, float]]:
        for number, absmax in largest.items():
            if self._is(number, lane) and (known := DTYPES.get(self._sites[number].dtype)) is not None:
                yield self._sites[number].fqn, 100.0 * absmax / known.max

    def _lost(self, what: Updates) -> None:
        seen = what.parameters.items()
        self._totals["updates/lost"] = what.lost / what.wanted
        self._shares["updates/lost"] = {name: one.lost / one.wanted for name, one in seen if one.wanted}
        self._shares["updates/update_to_weight"] = {name: one.update / one.absmax for name, one in seen if one.absmax}

    def _underflow(self, counted: Mapping[str, tuple[int, int]]) -> None:
        elements = sum(total for _, total in counted.values())
        if elements:
            self._totals["gradients/underflow"] = sum(zeros for zeros, _ in counted.values()) / elements
            self._shares["gradients/underflow"] = {
                name: zeros / total for name, (zeros, total) in counted.items() if total
            }

    def _worst(self, statistic: str, values: Mapping[str, float]) -> dict[str, float]:
        """Those that are named already, and as many of the worst others as there is room for."""
        named = self._named.setdefault(statistic, set())
        others = sorted((name for name in values if name not in named and values[name]), key=lambda n: -values[n])
        named.update(others[: MOST_NAMED - len(named)])
        return {f"{PREFIX}/{statistic}/{name or 'root'}": values[name] for name in values if name in named}


def _by_module(values: Iterable[tuple[str, float]], join: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values:
        found[name] = join((found[name], value)) if name in found else value
    return found


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
        every: every module is measured in each ``every``-th training step, the first included; in the others, and always
            with 0, only the loss and the gradients of each optimizer step.
        overhead_budget: share of the time that looks may take after the first steps, e.g. 0.05 (``"auto"``: 1 % on a GPU, 5 % on a CPU); in the
            steps between them what ``every`` says is measured. ``"1/16"`` looks at one of 16 steps; None at all.
        replay: make a call that fails again in the process itself, with each operator on record; the failing call is left in ``capsule``
            of the run directory. False makes none again, and the report seldom knows the operator and the edit.
        statistics: keep the numbers that :meth:`scalars` gives.

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
        every: int = 1,
        overhead_budget: float | str | None = None,
        replay: bool = True,
        statistics: bool = False,
    ) -> None:
        self._model = model
        self._out = Path(out) if out is not None else None
        self._again = functools.partial(
            Watched, every=every, overhead_budget=overhead_budget, replay=replay, statistics=statistics
        )
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
            call = next(calls)
            if call > 1:
                self._watched = self._again(numbered(self._out, call))
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

    def scalars(self) -> dict[str, float]:
        """Numbers for an experiment tracker, by name, since this was asked last; after the block the number of findings, by id.

        Percent of the dtype's max, elements that are not finite, gradients that underflow, updates that are lost: totals, and the worst modules.
        Nothing is measured for it, and nothing waits for a GPU.

        Raises:
            dtypedoctor.errors.UsageError: inside of the block, where ``statistics=True`` was not given.
        """
        return self._watched.scalars()

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
            lines += _what_to_do(finding, advice.get(finding.id))
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

    def scalars(self) -> dict[str, float]:
        """How many findings there are, and of which id, as numbers for an experiment tracker."""
        counts = Counter(f"dtypedoctor/findings/{finding.id}" for finding in self.findings)
        return {
            "dtypedoctor/findings/total": float(len(self.findings)),
            **{name: float(n) for name, n in counts.items()},
        }

    def _repr_html_(self) -> str:
        """The whole report in a frame of its own, so that its style and the notebook's do not meet."""
        page = html.escape(render_html(public_run(self)))
        looks = 'title="dtypedoctor report" sandbox="allow-scripts" style="width:100%;height:36em;border:0"'
        return f'<iframe srcdoc="{page}" {looks}></iframe>'

    def show(self) -> None:
        """Prints the report as ``dtypedoctor report`` does."""
        print_document(public_run(self), Console())


def _what_to_do(finding: Finding, advice: Advice | None) -> Iterator[str]:
    """The advice on a finding, the edit where there is one, and the fix that needs none."""
    if advice is not None:
        yield from (f"  {line}" for line in _advised(advice))
    if finding.fqn and "bfloat16" in finding.remedies:
        yield f'  to try without an edit: dtypedoctor.apply(model, "{KEEP_FLOAT32}:{finding.fqn}")'


def _advised(advice: Advice) -> Iterator[str]:
    yield f"do this: {one_line(advice.text, 300)}"
    changed = diff_of(advice.edits) if advice.edits else advice.code
    yield from (f"  {line}" for line in changed.splitlines())


def numbered(out: Path | None, call: int) -> Path | None:
    """The run directory of another part: ``OUT-2``, ``OUT-3``, …; None where none is named."""
    return out.with_name(f"{out.name}-{call}") if out is not None else None


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
        every: everything is measured in each ``every``-th training step, see :class:`ProcessWatch`.
        overhead_budget: share of the time that measuring may take, see :class:`watch`.
        replay: replay what fails, see :class:`watch`.
        quiet: nothing is printed at the end.
        statistics: keep what :meth:`scalars` gives.

    Attributes:
        directory: the run directory, from :meth:`begin` on.
        report: what is said at the end; None before.
    """

    def __init__(
        self,
        out: Path | None,
        *,
        every: int = 1,
        overhead_budget: float | str | None = None,
        replay: bool = False,
        quiet: bool = False,
        statistics: bool = False,
    ) -> None:
        self._every = every
        self._budget = budget_of(overhead_budget)
        self._say = (lambda text: None) if quiet else say
        self._replay = replay
        self._statistics = Statistics() if statistics else None
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
        _check_module(model)
        if (other := watched_for()) is not None:
            raise UsageError(f"this process is already recorded in {other}", "Stop that recording first.")
        self._folder = _record_folder(self._out, self._name)
        self.directory = self._folder.directory
        trace = self._folder.private / BEFORE
        trace.mkdir()
        with contextlib.suppress(OSError):  # of a program that is killed the record stays where it is then
            move_when_this_process_ends(str(self._folder.private), str(self.directory.absolute()))
        self._recording = Recording(trace)
        self._recording.writer.listener = self._statistics
        self._recording.follow_program("watched")
        process = ProcessWatch(self._recording.writer, every=self._every, budget=self._budget)
        self._recording.torch_is_there(process)
        process.start()
        if self._replay:
            process.instruments.replay_failures()
        # What ends the program is shown before anybody can tell the watch of it.
        self._show_frames = hide_in_excepthook()
        if model is not None:
            process.instruments.attach(model)
        _current = self

    def scalars(self) -> dict[str, float]:
        """What :meth:`watch.scalars` gives."""
        if self.report is not None:
            return self.report.scalars()
        if self._statistics is None:
            raise UsageError("no statistics are kept", "Use `watch(..., statistics=True)`.")
        return self._statistics.take()

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


def _record_folder(out: Path | None, name: str) -> RecordFolder:
    """Where this process records: ``out``, or in a directory of its own in there where it is one of several."""
    here = member()
    if here is not None:
        out = rank_directory(out if out is not None else job_directory(name), here.rank)
    return new_record(out, name, Path(sys.argv[0]).resolve().parent)


def _check_module(model: object) -> None:
    if model is not None and not isinstance(model, nn.Module):
        what = f"{type(model).__module__}.{type(model).__qualname__}"
        hint = "Pass the model, or nothing: every module that is called is instrumented."
        raise UsageError(f"{what} is not a torch.nn.Module", hint)


def _status(error: BaseException | None) -> int:
    """The exit status that the program is about to leave with, as far as ``sys.exit`` says it; 0 else."""
    if not isinstance(error, SystemExit) or error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1
