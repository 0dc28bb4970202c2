"""Counts what ``torch.compile`` gave up on: graph breaks, recompiles, and functions that it stopped compiling.

Dynamo's counters know how many graph breaks and graphs there were. Why a break happened, which guard failed and that a
limit was hit is only logged, so this listens to Dynamo's loggers. It prints nothing and changes no setting of the compiler.
The log lines that are read here have the same form in torch 2.9 to 2.13.
"""

import logging
import os
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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


Record = CompileCounts | GraphBreak | Recompiled | RecompileLimit


class CompileWatch:
    """Listens to Dynamo while it is entered; :meth:`observations` may be called inside and after."""

    def __init__(self) -> None:
        self._break_lines: list[str] = []
        self._recompile_lines: list[str] = []
        self._limit_lines: list[str] = []
        self._attached: list[tuple[logging.Logger, logging.Handler, int, bool]] = []
        self._switched_on: list[str] = []
        self._graphs_before = 0
        self._graphs: int | None = None

    def __enter__(self) -> Self:
        load_compiler()
        self._graphs, self._graphs_before = None, _unique_graphs()
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
        self._graphs = _unique_graphs()
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

    @property
    def unique_graphs(self) -> int:
        """Graphs that were handed to the backend; the program may have set Dynamo's counter back."""
        graphs = _unique_graphs() if self._graphs is None else self._graphs
        return max(0, graphs - self._graphs_before)

    def observations(
        self, module_at: Callable[[str], str | None] = lambda place: None
    ) -> Iterator[tuple[Record, str | None]]:
        """What has happened so far since entering, up to leaving, as records of the trace, each with the module that it is about.

        Args:
            module_at: dotted name of the module whose code stands at ``FILE:LINE``, where there is one.
        """
        yield CompileCounts(unique_graphs=self.unique_graphs), None
        files = imported_files()

        # equal breaks are one record, the most frequent first
        breaks: dict[tuple[str, str, str], list[GraphBreak]] = {}
        for one in _graph_breaks(self._break_lines):
            breaks.setdefault((one.kind, one.explanation, one.frames[-1]), []).append(one)
        for first, *others in sorted(breaks.values(), key=len, reverse=True):
            fqn = next(filter(None, map(module_at, reversed(first.frames))), None)
            frames = [_from_package(frame, files) for frame in first.frames]
            yield replace(first, frames=frames, count=1 + len(others)), fqn

        recompiled: dict[tuple[str, str], list[Sequence[str]]] = {}
        for line in self._recompile_lines:
            if (found := _RECOMPILE.search(line)) is not None:
                # of each version compiled before, newest first, the guard that failed
                guards = [guard["guard"].partition(": ")[2].strip() for guard in _GUARD.finditer(line)]
                recompiled.setdefault((found["function"], found["place"]), []).append(guards)
        for (function, place), times in sorted(recompiled.items(), key=lambda one: -len(one[1])):
            newest = list(dict.fromkeys(guards[0] for guards in times if guards))[:MAX_GUARDS]
            record = Recompiled(function=function, place=_from_package(place, files), count=len(times), guards=newest)
            yield record, None

        for found in filter(None, map(_LIMIT.search, self._limit_lines)):
            hit = RecompileLimit(
                limit=found["limit"],
                value=int(found["value"]),
                function=found["function"],
                place=_from_package(found["place"], files),
                guard=found["guard"].strip(),
            )
            yield hit, module_at(found["place"])


class _Listener(logging.Handler):
    """Keeps the messages of a logger."""

    def __init__(self, heard: list[str], level: int) -> None:
        super().__init__(level)
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self._heard.append(record.getMessage())
        repeat_break_reports()  # else only the first of equal breaks would come with its stack


def _unique_graphs() -> int:
    return int(compiler_counters()["stats"]["unique_graphs"])


def _graph_breaks(lines: Iterable[str]) -> Iterator[GraphBreak]:
    """The graph breaks that Dynamo has logged, each by itself."""
    for found in filter(None, map(_BREAK.search, lines)):
        reason, _, stack = found["reason"].partition("User code traceback:")
        explained, context = _EXPLAINED.search(reason), _CONTEXT.search(reason)
        frames = [
            f"{frame['file']}:{frame['line']} {frame['function']}"
            for frame in _FRAME.finditer(stack)
            if not _is_not_the_programs(frame["file"])
        ]
        yield GraphBreak(
            kind=explained["kind"] if explained else reason.split("\n", 1)[0],
            explanation=explained["explanation"] if explained else "",
            context=context["context"][:MAX_TEXT] if context else "",
            frames=frames[-MAX_FRAMES:] or [found["place"]],
            count=1,
        )


def _is_not_the_programs(file: str) -> bool:
    """Whether neither a script nor a library holds this code, but torch, the standard library (``ctypes``, ``logging``) or what watches."""
    if file.startswith((TORCH_DIRECTORY, os.path.dirname(__file__))):
        return True
    return file.startswith(STANDARD_LIBRARY) and not any(folder in file for folder in INSTALLED)


def _from_package(place: str, files: Mapping[str, str]) -> str:
    """``FILE:LINE`` (and what follows) with the file's path from the top of its package on."""
    file, _, rest = place.partition(":")
    return f"{files.get(file, file)}:{rest}"
