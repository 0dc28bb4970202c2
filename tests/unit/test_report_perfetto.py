"""Perfetto: the runs as a trace that meets the Trace Event Format."""

import json
import math
from array import array
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from report_builders import everything, overflow

from dtypedoctor.report import to_perfetto
from dtypedoctor.report.model import ModulePicture, Picture, Report, Series
from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.to_perfetto import render_perfetto

NEEDED = {"X": {"ts", "dur", "tid"}, "i": {"ts", "s", "tid"}, "C": {"ts"}, "M": set()}
"""What an event of each phase must have beside ``name``, ``ph``, ``pid`` and ``args``."""


def series(lane: str, *values: float, bad: dict[int, tuple[int, int]] | None = None) -> Series:
    """One row of the map in float16."""
    return Series(lane=lane, dtype="float16", absmax=array("d", values), nonfinite=bad or {})


def picture(steps: int = 2) -> Picture:
    """A model whose second module is first measured in its second step."""
    numbers = tuple(range(1, steps + 1))
    rest = [2.0] * (steps - 2)
    modules = (
        ModulePicture(root=0, fqn="", cls="Net", series=(series("forward", 1.0, 8.0, *rest),)),
        ModulePicture(
            root=0,
            fqn="layers.0.mlp",
            cls="MLP",
            series=(series("forward", 32752.0, 0.0, *rest, bad={1: (0, 4)}), series("backward", 0.5, math.nan, *rest)),
        ),
        ModulePicture(root=0, fqn="layers.1", cls="Late", series=(series("forward", math.nan, 3.0, *rest),)),
    )
    return Picture(label="baseline", columns=tuple(map(str, numbers)), modules=modules)


def pictured(steps: int = 2, **changed: Any) -> Report:
    """A report whose finding is in the second step of that model."""
    finding = replace(overflow().findings[0], fqn="layers.0.mlp", phase="forward", step=2, **changed)
    return replace(overflow(), findings=(finding,), pictures=(picture(steps),))


def trace(report: Report) -> list[dict[str, Any]]:
    """The events, each checked against the format."""
    text = render_perfetto(run_document(report))
    assert text.isascii()
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    for event in events:
        assert {"name", "ph", "pid", "args"} <= event.keys()
        assert NEEDED[event["ph"]] <= event.keys()
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) for key in ("pid", "tid", "ts", "dur") if key in event)
        assert event.get("dur", 1) > 0
    return events


def slices(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Slices by name."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["name"]].append(event)
    return found


def test_slices_lie_in_each_other() -> None:
    """Perfetto draws a slice below the one that it lies in; one that only overlaps it would be dropped."""
    open_ones: list[int] = []
    for event in (event for event in trace(pictured()) if event["ph"] == "X"):
        while open_ones and open_ones[-1] <= event["ts"]:
            open_ones.pop()
        assert not open_ones or event["ts"] + event["dur"] <= open_ones[-1]
        open_ones.append(event["ts"] + event["dur"])


def test_a_module_says_its_dtype_and_magnitude() -> None:
    """Share of the dtype's max, and what was not finite; no maximum where no element was finite."""
    found = slices(trace(pictured()))
    first, _, last = (one["args"] for one in found["layers.0.mlp"])  # the second is of the backward pass
    assert first == {"class": "MLP", "dtype": "float16", "inf": 0, "NaN": 0, "max": 32750.0, "% of max": 50.0}
    assert last == {"class": "MLP", "dtype": "float16", "inf": 4, "NaN": 0}
    assert [one["args"]["max"] for one in found["Net"]] == [1.0, 8.0]
    assert len(found["layers.1"]) == 1
    assert set(found) == {"step 1", "step 2", "forward", "backward", "Net", "layers.0.mlp", "layers.1"}


@pytest.mark.parametrize(
    ("changed", "at"),
    [({}, "layers.0.mlp"), ({"fqn": None}, "forward"), ({"phase": "optimizer"}, "step 2"), ({"step": None}, "step 1")],
)
def test_a_finding_stands_where_it_is(changed: dict[str, Any], at: str) -> None:
    """At its module, else its phase, its step, the beginning."""
    report = pictured()
    finding = replace(report.findings[0], **changed)
    events = trace(replace(report, findings=(finding,)))
    (instant,) = [event for event in events if event["ph"] == "i"]
    assert instant["name"] == "float16-overflow"
    begin = slices(events)[at][-1]["ts"]
    assert instant["ts"] == begin


def test_a_long_run_is_cut_around_its_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the metadata say so."""
    monkeypatch.setattr(to_perfetto, "MOST_SLICES", 12)
    report = replace(pictured(9), findings=(replace(overflow().findings[0], step=7),))
    steps = [name for name in slices(trace(report)) if name.startswith("step ")]
    assert steps == ["step 6", "step 7", "step 8"]
    data = json.loads(render_perfetto(run_document(report)))
    assert data["otherData"]["notes"] == ["baseline: steps 6 to 8 of 9"]


@pytest.mark.parametrize("report", everything(), ids=lambda report: report.name[:30])
def test_reports_without_traces_hold_their_findings(report: Report) -> None:
    """A report.json alone has no measurements."""
    assert [event["ph"] for event in trace(report)] == ["i"] * len(report.findings)
