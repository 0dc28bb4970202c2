"""Runs as a Perfetto trace: modules as slices of each step and phase, findings as instant events, in JSON of the Trace Event Format.

Files open in https://ui.perfetto.dev and in ``chrome://tracing``. A trace of dtypedoctor knows the order of what ran and not its duration, so
each measured output takes one microsecond, and a module spans what runs inside of it.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

from dtypedoctor.dtypes import DTYPES
from dtypedoctor.report.document import Document
from dtypedoctor.report.model import LANES, ModulePicture, Picture, Series
from dtypedoctor.report.pictures import LANE_OF_PHASE
from dtypedoctor.report.text import one_line
from dtypedoctor.values import dataclass

MOST_SLICES = 200_000
"""Slices of one run. Of a longer one the steps around its first finding are kept, which the metadata say."""

_ALL_MODULES = 1
"""The one track of a run."""
_Event = dict[str, Any]


def render_perfetto(document: Document) -> str:
    """The runs of a document, each as a process of the trace; without traces, its findings alone. ASCII only."""
    events: list[_Event] = []
    notes: list[str] = []
    for run, (picture, findings) in enumerate(_runs(document), 1):
        timeline = _Timeline(run, picture, findings)
        events += timeline.events
        notes += [*timeline.notes, *(f"{picture.label}: {note}" for note in picture.notes)]
    if not events:
        events = [_instant(1, 0, one) for part in document.parts or (document,) for one in _findings(part)]
    told = {
        "headline": one_line(document.title, 600),
        "time": "order of execution, not duration",
        "notes": [one_line(note, 600) for note in notes],
    }
    text = {"traceEvents": events, "displayTimeUnit": "ns", "otherData": told}
    return json.dumps(text, separators=(",", ":"), allow_nan=False) + "\n"


def _runs(document: Document) -> Iterator[tuple[Picture, Sequence[Mapping[str, Any]]]]:
    """Each run that there is a picture of, and what was found in it: findings are those of the baseline, the first one."""
    for part in document.parts or (document,):
        pictures = part.map.pictures if part.map is not None else ()
        for position, picture in enumerate(pictures):
            yield picture, (_findings(part) if position == 0 else ())


def _findings(document: Document) -> Sequence[Mapping[str, Any]]:
    return document.data().get("findings") or ()


@dataclass(slots=True)
class _Node:
    """A place in the tree of module names: what was measured of the module in one cell of the map, if it was, and its children."""

    module: ModulePicture | None = None
    series: Series | None = None
    inside: "dict[str, _Node]" = field(default_factory=dict)


class _Timeline:
    """The events of one run, one step after the other.

    Args:
        run: number of the process in the trace.
        picture: the run.
        findings: what was found in it, as ``report.json`` has it.
    """

    def __init__(self, run: int, picture: Picture, findings: Sequence[Mapping[str, Any]]) -> None:
        self._run = run
        self._picture = picture
        self._findings = findings
        self._now = 0
        self._begins: dict[tuple[str, str, str], int] = {}
        self.notes: list[str] = []
        self.events: list[_Event] = [
            _metadata("process_name", run, {"name": one_line(picture.label)}),
            _metadata("thread_name", run, {"name": "steps, phases and modules"}, _ALL_MODULES),
        ]
        for column in self._shown():
            self._step(column)
        self.events += [_instant(run, self._begin_of(one), one) for one in findings]

    def _shown(self) -> Sequence[int]:
        """The columns of the map that have room."""
        count = len(self._picture.columns)
        most = max(1, MOST_SLICES // max(1, sum(len(module.series) for module in self._picture.modules)))
        if count <= most:
            return range(count)
        steps = [one["step"] for one in self._findings if one.get("step")]
        first = self._column_of(steps[0]) if steps else 0
        start = max(0, min(first - most // 2, count - most))
        names = self._picture.columns
        self.notes.append(f"{self._picture.label}: steps {names[start]} to {names[start + most - 1]} of {names[-1]}")
        return range(start, start + most)

    def _column_of(self, step: int) -> int:
        last = [name.rpartition("–")[2] for name in self._picture.columns]
        ends = [int(end) if end.isdecimal() else position for position, end in enumerate(last, 1)]
        return next((column for column, end in enumerate(ends) if step <= end), len(ends) - 1)

    def _step(self, column: int) -> None:
        name, begin = self._picture.columns[column], self._now
        self._begins[name, "", ""] = begin
        place = len(self.events)
        for lane in LANES:
            self._phase(lane, column)
        if self._now > begin:
            self.events.insert(place, self._slice(f"step {name}", "step", begin, {}))
            self._counters(column, begin)

    def _phase(self, lane: str, column: int) -> None:
        tree = _tree(self._picture.modules, lane, column)
        if not tree:
            return
        name, begin, place = self._picture.columns[column], self._now, len(self.events)
        self._begins[name, lane, ""] = begin
        for node in tree:
            self._module(node, lane, column)
        self.events.insert(place, self._slice(lane, "phase", begin, {}))

    def _module(self, node: _Node, lane: str, column: int) -> None:
        begin, place = self._now, len(self.events)
        for child in node.inside.values():
            self._module(child, lane, column)
        if node.module is None or node.series is None:
            return
        self._now += 1  # its own output
        self._begins.setdefault((self._picture.columns[column], lane, node.module.fqn), begin)
        name = node.module.fqn or node.module.cls or "model"
        arguments = {"class": node.module.cls, **_measured(node.series, column)}
        self.events.insert(place, self._slice(name, "module", begin, arguments))

    def _slice(self, name: str, category: str, begin: int, arguments: Mapping[str, Any]) -> _Event:
        return {
            "name": one_line(name), "cat": category, "ph": "X", "ts": begin, "dur": self._now - begin,
            "pid": self._run, "tid": _ALL_MODULES, "args": dict(arguments),
        }  # fmt: skip

    def _counters(self, column: int, begin: int) -> None:
        """The largest share of a dtype's max in this step, by lane, and how many elements were not finite."""
        shares: dict[str, float] = {}
        bad = 0
        for module in self._picture.modules:
            for series in module.series:
                measured = _measured(series, column)
                bad += measured.get("inf", 0) + measured.get("NaN", 0)
                if "% of max" in measured:
                    shares[series.lane] = max(shares.get(series.lane, 0.0), measured["% of max"])
        for name, values in (("% of dtype max", shares), ("inf and NaN elements", {"elements": bad})):
            if values:
                self.events.append({"name": name, "ph": "C", "ts": begin, "pid": self._run, "args": dict(values)})

    def _begin_of(self, finding: Mapping[str, Any]) -> int:
        """Where a finding is in time: at its module, else at its phase, at its step, at the beginning."""
        step = self._picture.columns[self._column_of(finding["step"])] if finding.get("step") else ""
        lane = LANE_OF_PHASE.get(finding.get("phase") or "", "parameters")
        keys = ((step, lane, finding.get("fqn") or ""), (step, lane, ""), (step, "", ""))
        return next((self._begins[key] for key in keys if key in self._begins), 0)


def _tree(modules: Sequence[ModulePicture], lane: str, column: int) -> list[_Node]:
    """The modules that were measured in a cell, below each other as their names say; one node for each outermost module."""
    roots: dict[int, _Node] = {}
    for module in modules:
        for series in module.series:
            if series.lane != lane or not _measured(series, column):
                continue
            node = roots.setdefault(module.root, _Node())
            for part in filter(None, module.fqn.split(".")):
                node = node.inside.setdefault(part, _Node())
            node.module, node.series = module, series  # of several dtypes the last
    return list(roots.values())


def _measured(series: Series, column: int) -> dict[str, Any]:
    """What a slice says of itself; nothing where the module was not measured in this step."""
    absmax, (nan, inf) = series.absmax[column], series.nonfinite.get(column, (0, 0))
    if math.isnan(absmax) and not nan and not inf:
        return {}
    told: dict[str, Any] = {"dtype": series.dtype, "inf": inf, "NaN": nan}
    if math.isfinite(absmax) and (absmax or not (nan or inf)):  # 0 may also say that no element was finite
        told["max"] = float(f"{absmax:.4g}")
        if (known := DTYPES.get(series.dtype)) is not None:
            told["% of max"] = float(f"{100 * absmax / known.max:.3g}")
    return told


def _metadata(name: str, run: int, arguments: Mapping[str, Any], track: int = 0) -> _Event:
    return {"name": name, "ph": "M", "pid": run, "tid": track, "args": dict(arguments)}


def _instant(run: int, when: int, finding: Mapping[str, Any]) -> _Event:
    told = {
        key: finding.get(key) for key in ("severity", "confidence", "fqn", "op", "phase", "step", "dtype", "source")
    }
    shown = {
        key: one_line(value) if isinstance(value, str) else value for key, value in told.items() if value is not None
    }
    return {
        "name": one_line(finding["id"]), "cat": "finding", "ph": "i", "s": "p", "ts": when, "pid": run, "tid": _ALL_MODULES,
        "args": {"summary": one_line(finding["summary"], 600), **shown},
    }  # fmt: skip
