"""Opens a run that lies on disk, whoever made it and whenever."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtypedoctor.errors import EmptyTraceError, UsageError
from dtypedoctor.foreign_files import is_real_directory, parse_json, read_file
from dtypedoctor.runner.child import STDERR
from dtypedoctor.runner.launch import EXIT, Run, WorkerExit
from dtypedoctor.scenario.request import REQUEST
from dtypedoctor.trace.events import Stage
from dtypedoctor.trace.ranks import leading_directory
from dtypedoctor.trace.reader import read_trace
from dtypedoctor.trace.writer import EVENTS

__all__ = ["BEFORE", "SavedRun", "open_run"]

BEFORE = "before"
"""The run of a treatment that stands for it: the untreated one."""

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
    request = _json(directory / REQUEST)
    scenario = request.get("scenario")
    foreign = _is_script(scenario) or any(stage.workload == "script" for stage in trace.all(Stage))
    run = Run(trace=trace, exit=_exit(directory), directory=directory, foreign=foreign)
    return SavedRun(label=str(directory), run=run, request=request)


def _died_at_once(directory: Path) -> EmptyTraceError:
    printed = directory / STDERR
    return EmptyTraceError(
        f"{directory}: an empty trace: the run died before it wrote anything, so there is nothing to compare",
        f"What it printed last may say why: {printed}" if printed.is_file() else "Run it again.",
    )


def _trace_directory(place: Path) -> Path:
    for directory in map(leading_directory, (place, *([place / BEFORE] if is_real_directory(place / BEFORE) else []))):
        if (directory / EVENTS).is_file():
            return directory
        if (directory / REQUEST).is_file() and not (directory / EVENTS).exists():
            raise _died_at_once(directory)
    if not place.exists():
        raise UsageError(f"{place}: no such directory", "Give a directory that a run has left.")
    parts = list(_parts(place)) if place.is_dir() else []
    hint = f"It holds these runs: {', '.join(parts[:_MOST_NAMED])}" + (", …" if len(parts) > _MOST_NAMED else "")
    raise UsageError(f"{place}: no trace here", hint if parts else "Give a directory that a run has left.")


def _parts(place: Path) -> Iterator[str]:
    for pattern in ("*", "*/*"):
        for path in sorted(place.glob(f"{pattern}/{EVENTS}")):
            yield str(path.parent)


def _exit(directory: Path) -> WorkerExit:
    """How the worker ended; a trace that came without that and has an end is taken at its own word."""
    found = _json(directory / EXIT)
    try:
        return WorkerExit(code=int(found["code"]), timed_out=bool(found["timed_out"]), seconds=float(found["seconds"]))
    except (KeyError, TypeError, ValueError, OverflowError):
        return WorkerExit(code=0, timed_out=False, seconds=0.0, unknown=True)


def _is_script(scenario: Any) -> bool:
    try:
        return bool(scenario["steps"][0]["workload"]["kind"] == "script")
    except (KeyError, IndexError, TypeError):
        return False


def _json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_file(path))
    except (OSError, ValueError):  # what lies beside a trace is a help, never a condition
        return {}
    return found if isinstance(found, dict) else {}
