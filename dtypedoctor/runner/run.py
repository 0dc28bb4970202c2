"""A finished run: what its worker has left and how that ended, whether it was just collected or lies on disk."""

import contextlib
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dtypedoctor.errors import EmptyTraceError, UsageError
from dtypedoctor.foreign_files import is_real_directory, read_file, read_settings, read_tail, write_file
from dtypedoctor.redaction.messages import elided
from dtypedoctor.redaction.redact import REQUEST, forget_request
from dtypedoctor.redaction.secrets import masked
from dtypedoctor.trace.events import NO_PYTHON, NO_TORCH, End, NotWatched, Refused, Stage
from dtypedoctor.trace.lines import EVENTS
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.ranks import BEFORE, BEGUN, REFUSED, header, lead, leading_directory
from dtypedoctor.trace.reader import read_trace, steps_by_call
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.unpatched import to_json

STDOUT, STDERR = "stdout.txt", "stderr.txt"
"""Where a worker's streams go, in its directory."""
EXIT = "exit.json"
"""Where it is written down how the worker ended."""
NO_END = "left no end record and no exit status (it was killed together with dtypedoctor, or is still running)"
_LONGEST_LINE = 5000
_LARGEST_END = 1 << 20
"""Bytes of the standard error in which the last line is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """How a worker process ended.

    Attributes:
        code: exit status, or minus the signal that ended it.
        timed_out: whether the doctor stopped it at its time limit.
        seconds: wall-clock time from start to end.
        unknown: whether nobody was there to see it.
        asked_to_end: the signal that asked it to end and came by way of the doctor; 0 where none did. It may have heeded it in
            its own time and with any status.
        ended_by_launcher: the signal by which its launcher ended it because another of its processes had failed; 0 where it ended by itself. If
            its trace has an end, ``code`` is what that stands for, and not a status that it ended with.
        left: processes with torch that it has left running, in words; empty where there are none.
    """

    code: int
    timed_out: bool
    seconds: float
    unknown: bool = False
    asked_to_end: int = 0
    ended_by_launcher: int = 0
    left: str = ""

    def describe(self) -> str:
        """How it ended, in words."""
        if self.unknown:
            return "ended; its exit status was not recorded"
        if self.timed_out:
            return f"was stopped at its time limit after {self.seconds:.0f} s"
        if self.ended_by_launcher:
            return f"was ended by its launcher ({signal.Signals(self.ended_by_launcher).name}) after another process had failed"
        if self.code >= 0:
            return f"ended with status {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        likely = " (often: out of memory)" if -self.code == signal.SIGKILL else ""
        return f"was killed by {name}{likely}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run: its trace, how the worker ended, and where everything lies.

    Attributes:
        foreign: whether it ran a user's script, which may leave with any status, or without a word by ``os._exit``.
        rank: which process of several it is; None where there is one only.
        ranks: all of them, this one included, in order.
        children: by number the processes that a script has spawned.
        spawned: which of those it is; None where it is the script's own.
        ended_by_program: whether another process of the script has ended it.
        others: the other processes of the same script, where one of them stands for all.
        deleted: whether the program has deleted the directory in which it was recorded, so that nothing is known of it.
    """

    trace: Trace
    exit: WorkerExit
    directory: Path
    foreign: bool = False
    rank: int | None = None
    ranks: "tuple[Run, ...]" = ()
    children: "Mapping[int, Run]" = field(default_factory=dict)
    spawned: int | None = None
    ended_by_program: bool = False
    others: "tuple[Run, ...]" = ()
    deleted: bool = False

    @property
    def processes(self) -> "tuple[Run, ...]":
        """All processes of the same program, this one included."""
        return self.ranks or (self, *self.others)

    @property
    def died(self) -> bool:
        """Whether the worker ended without finishing its trace, and not because a script wanted it so."""
        wanted = self.foreign and self.exit.code >= 0 and not self.exit.unknown
        return self.exit.timed_out or (self.trace.end is None and not wanted)

    def last_words(self) -> str:
        """How the worker ended; for a Python process that failed also the last line of its standard error."""
        if self.exit.unknown and self.trace.end is None:
            return NO_END
        if self.exit.code <= 0 or self.exit.timed_out:
            return self.exit.describe()
        try:
            end = read_tail(self.directory / STDERR, _LARGEST_END).decode("utf-8", "replace")
        except OSError:
            end = ""
        last = next((line.strip() for line in reversed(end.split("\n")) if line.strip()), "")
        return self.exit.describe() + (f": {masked(elided(last[:_LONGEST_LINE]))[:200]}" if last else "")


def collect(directory: Path, ended: WorkerExit, *, foreign: bool = False) -> Run:
    """The run that a worker has left in ``directory``; how it ended is written down beside it.

    Raises:
        UsageError: the worker says that what it was asked for cannot be run at all.
    """
    forget_request(directory)
    with contextlib.suppress(OSError):  # a full disk, or the directory is gone: what is known is told all the same
        write_file(directory / EXIT, to_json(asdict(ended)))
    trace = _trace(directory)
    run = Run(trace=steps_by_call(trace) if foreign else trace, exit=ended, directory=directory, foreign=foreign)
    if (directory / REFUSED).exists():
        raise UsageError(read_file(directory / REFUSED).decode("utf-8", "replace"))
    refused = run.trace.last(Refused)
    if refused is not None:
        raise UsageError(refused.message, refused.hint)
    return run


def nothing_recorded(directory: Path, ended: WorkerExit) -> None:
    """Writes the trace of a command none of whose processes has imported torch, or could be recorded."""
    with contextlib.suppress(OSError):
        writer = TraceWriter(directory)
        writer.write(header())
        writer.write(Stage(n=writer.next_n(), index=0, name="script", workload="script"))
        why = NO_TORCH if (directory / BEGUN).exists() else NO_PYTHON
        writer.write(NotWatched(what="tensors and modules", why=why))
        if (
            ended.code in (-signal.SIGINT, *range(256)) and not ended.timed_out
        ):  # Python ends by SIGINT after KeyboardInterrupt
            outcome = "raised" if ended.code else "completed"
            writer.write(End(n=writer.next_n(), outcome=outcome, steps_completed=0))
        writer.close()


def deleted(directory: Path, ended: WorkerExit) -> Run:
    """The run of a script that has deleted ``directory``, in which it was recorded."""
    return Run(
        trace=_nothing(f"the program deleted the folder in which it was, {directory}"),
        exit=ended,
        directory=directory,
        foreign=True,
        deleted=True,
    )


def _trace(directory: Path) -> Trace:
    if not (directory / EVENTS).exists():
        return _nothing(f"there is none in {directory}")
    try:
        return read_trace(directory)
    except (
        UsageError,
        OSError,
    ) as error:  # something has gone over it: that must not cost what else is known of the run
        return _nothing(f"it cannot be read: {error}")


def _nothing(why: str) -> Trace:
    return Trace(records=(), samples=(), sites={}, damage=(why,))


def led_by(ranks: tuple[Run, ...], rank: int) -> Run:
    """The run of one rank, which stands for that of all; it is also noted where they lie."""
    leading = next(run for run in ranks if run.rank == rank)
    with contextlib.suppress(OSError):  # something else has the link's name
        lead(leading.directory.parent, rank)
    return replace(leading, ranks=ranks)


_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRun:
    """A run from disk.

    Attributes:
        label: the directory as the user would name it.
        run: what was left.
        request: what the worker was asked to do; empty where that is not known.
    """

    label: str
    run: Run
    request: dict[str, Any] = field(default_factory=dict)


def open_run(place: Path) -> SavedRun:
    """Reads the run in ``place``: a run directory (of which its ``before`` is taken), one of its parts, or a trace.

    Raises:
        UsageError: no run was left there, or its trace cannot be read.
        EmptyTraceError: the run died before it wrote a whole record.
    """
    directory = _trace_directory(place)
    trace = read_trace(directory)
    if not trace.usable:
        raise _died_at_once(directory)
    request = read_settings(directory / REQUEST)
    scenario = request.get("scenario")
    foreign = _is_script(scenario) or any(stage.workload == "script" for stage in trace.all(Stage))
    run = Run(trace=trace, exit=_exit(directory), directory=directory, foreign=foreign)
    return SavedRun(label=str(directory), run=run, request=request)


def _died_at_once(directory: Path) -> EmptyTraceError:
    printed = directory / STDERR
    return EmptyTraceError(
        f"{directory}: no whole record at the beginning of the trace: the run died before it wrote anything, or the file is damaged",
        f"What it printed last may say why: {printed}" if printed.is_file() else "Run it again.",
    )


def _trace_directory(place: Path) -> Path:
    for directory in map(leading_directory, [place, *filter(is_real_directory, [place / BEFORE])]):
        if (directory / EVENTS).is_file():
            return directory
        if (directory / REQUEST).is_file() and not (directory / EVENTS).exists():
            raise _died_at_once(directory)
    raise _without_trace(place)


def _without_trace(place: Path) -> UsageError:
    """What to say of a place without a trace: which of its parts are runs."""
    if not place.exists():
        return UsageError(f"{place}: no such directory", "Give a directory that a run has left.")
    deep = ("*", "*/*") if place.is_dir() else ()
    traces = (path for pattern in deep for path in sorted(place.glob(f"{pattern}/{EVENTS}")))
    parts = [str(path.parent) for path in traces if path.is_file()]
    hint = f"It holds these runs: {', '.join(parts[:_MOST_NAMED])}" + (", …" if len(parts) > _MOST_NAMED else "")
    return UsageError(f"{place}: no trace here", hint if parts else "Give a directory that a run has left.")


def _exit(directory: Path) -> WorkerExit:
    """How the worker ended; a trace that came without that and has an end is taken at its own word."""
    found = read_settings(directory / EXIT)
    try:
        launcher = int(found.get("ended_by_launcher", 0))
        return WorkerExit(
            code=int(found["code"]),
            timed_out=bool(found["timed_out"]),
            seconds=float(found["seconds"]),
            asked_to_end=int(found.get("asked_to_end", 0)),
            # Whatever else a foreign file holds is no signal
            ended_by_launcher=launcher and int(signal.Signals(launcher)),
            left=str(found.get("left", "")),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return WorkerExit(code=0, timed_out=False, seconds=0.0, unknown=True)


def _is_script(scenario: Any) -> bool:
    try:
        return bool(scenario["steps"][0]["workload"]["kind"] == "script")
    except (KeyError, IndexError, TypeError):
        return False
