"""Counts what ``torch.compile`` gave up on: graph breaks, recompiles, and functions that it stopped compiling.

Dynamo's counters know how many graph breaks and graphs there were. Why a break happened, which guard failed and that a
limit was hit is only logged, so this listens to Dynamo's loggers. It prints nothing and changes no setting of the compiler.
The log lines that are read here have the same form in torch 2.9 to 2.13.
"""

import logging
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import torch

from dtypedoctor._torch_private import FRAME_COMPILER, compiler_counters, load_compiler, log_state, repeat_break_reports
from dtypedoctor.instrument.frames import INSTALLED, imported_files
from dtypedoctor.trace.records.execution import CompileCounts, GraphBreak, Recompiled, RecompileLimit

TORCH_DIRECTORY = torch.__path__[0]
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
ARTIFACTS = ("graph_breaks", "recompiles")
"""Logs that are off unless asked for. Dynamo looks for the guard that failed only while the second is on."""

MAX_FRAMES = 6
MAX_TEXT = 400
MAX_GUARDS = 8

_BREAK = re.compile(
    r"Graph break.*? in user code at (?P<place>.+:\d+)\s*\nGraph Break Reason: (?P<reason>.*)", re.DOTALL
)
_EXPLAINED = re.compile(r"^(?P<kind>\S.*)\n +Explanation: (?P<explanation>.+)$", re.MULTILINE)
_CONTEXT = re.compile(r"Developer debug context: (?P<context>.+)")
_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
_RECOMPILE = re.compile(r"Recompiling function (?P<function>\S+) in (?P<place>.+:\d+)")
_GUARD = re.compile(r"^ *- (?P<guard>\d+/\d+: .+)$", re.MULTILINE)
_LIMIT = re.compile(
    r"hit config\.(?P<limit>\w+) \((?P<value>\d+)\)\s+function: '(?P<function>.+)' \((?P<place>.+:\d+)\)"
    r"\s+last reason: (?:\d+/\d+: )?(?P<guard>.+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompile:
    """A function was compiled again.

    Attributes:
        function: its name; ``torch_dynamo_resume_in_F_at_L`` is the rest of F after a graph break at line L.
        place: ``file:line`` of its definition.
        guards: for each version compiled before, newest first, the guard that failed, in Dynamo's words.
    """

    function: str
    place: str
    guards: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """What Dynamo did while it was watched.

    Attributes:
        breaks: number of graph breaks, from Dynamo's counter.
        graph_breaks: the breaks grouped, most frequent first. Breaks at which a function could not be split and was left to
            eager mode whole are among them, though Dynamo's counter leaves them out.
        unique_graphs: number of graphs handed to the backend.
        frames: number of functions (and rests of functions) that Dynamo tried to compile; 0 under ``fullgraph=True``, where
            Dynamo does not count them.
        frames_compiled: how many of them it did compile.
        recompiles: in the order in which they happened.
        limit_hits: in the order in which they happened.
    """

    breaks: int
    graph_breaks: tuple[GraphBreak, ...]
    unique_graphs: int
    frames: int
    frames_compiled: int
    recompiles: tuple[Recompile, ...]
    limit_hits: tuple[RecompileLimit, ...]


class CompileWatch:
    """Listens to Dynamo while it is entered; :meth:`report` may be called inside and after."""

    def __init__(self) -> None:
        self._break_lines: list[str] = []
        self._recompile_lines: list[str] = []
        self._limit_lines: list[str] = []
        self._attached: list[tuple[logging.Logger, logging.Handler, int, bool]] = []
        self._switched_on: list[str] = []
        self._before: dict[str, int] = {}
        self._after: dict[str, int] | None = None

    def __enter__(self) -> Self:
        load_compiler()

        self._after = None
        self._before = _counted()
        for artifact, heard in zip(ARTIFACTS, (self._break_lines, self._recompile_lines), strict=True):
            loggers = [name for name in logging.root.manager.loggerDict if name.endswith(f".__{artifact}")]
            already_on = log_state().is_artifact_enabled(artifact)
            if not already_on:
                log_state().enable_artifact(artifact)
                self._switched_on.append(artifact)
            for name in loggers:
                self._listen(logging.getLogger(name), heard, logging.DEBUG, printed=already_on)
        self._listen(logging.getLogger(FRAME_COMPILER), self._limit_lines, logging.WARNING, printed=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._after = _counted()
        for logger, listener, level, propagate in self._attached:
            logger.removeHandler(listener)
            logger.setLevel(level)
            logger.propagate = propagate
        self._attached.clear()
        log_state().artifact_names.difference_update(self._switched_on)
        self._switched_on.clear()

    def _listen(self, logger: logging.Logger, heard: list[str], level: int, *, printed: bool) -> None:
        listener = _Listener(heard, level)
        self._attached.append((logger, listener, logger.level, logger.propagate))
        logger.addHandler(listener)
        logger.propagate = logger.propagate and printed
        if not logger.isEnabledFor(level):
            logger.setLevel(level)

    def report(self) -> CompileReport:
        """What has happened so far since entering, up to leaving."""
        after = self._after if self._after is not None else _counted()
        done = {name: max(0, after[name] - before) for name, before in self._before.items()}
        groups: dict[tuple[str, str, str], GraphBreak] = {}
        for found in filter(None, map(_BREAK.search, self._break_lines)):
            reason, _, stack = found["reason"].partition("User code traceback:")
            explained = _EXPLAINED.search(reason)
            context = _CONTEXT.search(reason)
            frames = [
                f"{frame['file']}:{frame['line']} {frame['function']}"
                for frame in _FRAME.finditer(stack)
                if not _is_not_the_programs(frame["file"])
            ]
            one = GraphBreak(
                kind=explained["kind"] if explained else reason.split("\n", 1)[0],
                explanation=explained["explanation"] if explained else "",
                context=context["context"][:MAX_TEXT] if context else "",
                frames=frames[-MAX_FRAMES:] or [found["place"]],
                count=1,
            )
            key = one.kind, one.explanation, one.frames[-1]
            held = groups.get(key)
            groups[key] = one if held is None else replace(held, count=held.count + 1)
        return CompileReport(
            breaks=done["breaks"],
            graph_breaks=tuple(sorted(groups.values(), key=lambda group: -group.count)),
            unique_graphs=done["unique_graphs"],
            frames=done["frames"],
            frames_compiled=done["frames_compiled"],
            recompiles=tuple(_recompiles(self._recompile_lines)),
            limit_hits=tuple(_limit_hits(self._limit_lines)),
        )


class _Listener(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self, heard: list[str], level: int) -> None:
        super().__init__(level)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self._heard.append(record.getMessage())
        repeat_break_reports()  # else only the first of equal breaks would come with its stack


def _counted() -> dict[str, int]:
    """Dynamo's counters as they stand."""
    counters = compiler_counters()
    return {
        "breaks": sum(counters["graph_break"].values()),
        "unique_graphs": counters["stats"]["unique_graphs"],
        "frames": counters["frames"]["total"],
        "frames_compiled": counters["frames"]["ok"],
    }


def _is_not_the_programs(file: str) -> bool:
    """Whether neither a script nor a library holds this code, but torch, the standard library (``ctypes``, ``logging``) or what watches."""
    if file.startswith((TORCH_DIRECTORY, os.path.dirname(__file__))):
        return True
    return file.startswith(STANDARD_LIBRARY) and not any(folder in file for folder in INSTALLED)


def _recompiles(lines: list[str]) -> Iterator[Recompile]:
    for line in lines:
        found = _RECOMPILE.search(line)
        if found is not None:
            guards = tuple(guard["guard"].partition(": ")[2].strip() for guard in _GUARD.finditer(line))
            yield Recompile(function=found["function"], place=found["place"], guards=guards)


def _limit_hits(lines: list[str]) -> Iterator[RecompileLimit]:
    for line in lines:
        found = _LIMIT.search(line)
        if found is not None:
            yield RecompileLimit(
                limit=found["limit"],
                value=int(found["value"]),
                function=found["function"],
                place=found["place"],
                guard=found["guard"].strip(),
            )


def observations(
    report: CompileReport, module_at: Callable[[str], str | None] = lambda place: None
) -> Iterator[tuple[CompileCounts | GraphBreak | Recompiled | RecompileLimit, str | None]]:
    """The report as records of the trace, each with the module that it is about.

    Args:
        report: what Dynamo did.
        module_at: dotted name of the module whose code stands at ``FILE:LINE``, where there is one.
    """
    yield CompileCounts(unique_graphs=report.unique_graphs), None
    files = imported_files()
    for group in report.graph_breaks:
        fqn = next(filter(None, map(module_at, reversed(group.frames))), None)
        yield replace(group, frames=[_from_package(frame, files) for frame in group.frames]), fqn
    for (function, place), times in Counter((r.function, r.place) for r in report.recompiles).most_common():
        guards = [r.guards[0] for r in report.recompiles if (r.function, r.place) == (function, place) and r.guards]
        distinct = list(dict.fromkeys(guards))[:MAX_GUARDS]
        place = _from_package(place, files)
        yield Recompiled(function=function, place=place, count=times, guards=distinct), None
    for hit in report.limit_hits:
        yield replace(hit, place=_from_package(hit.place, files)), module_at(hit.place)


def _from_package(place: str, files: Mapping[str, str]) -> str:
    """``FILE:LINE`` (and what follows) with the file's path from the top of its package on."""
    file, _, rest = place.partition(":")
    return f"{files.get(file, file)}:{rest}"
