"""The Report: everything that is said about a scenario, as one value. Renderers turn it into text and decide nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.report.picture import Picture
from dtypedoctor.trials.results import Observer, Outcome, Parity, RunSummary, Trial

__all__ = ["SCHEMA", "Observer", "Outcome", "Parity", "Report", "RunSummary", "Status", "StripRow", "Trial"]

SCHEMA = 1


class Status(StrEnum):
    """Outcome of the run that is reported."""

    HEALTHY = "healthy"
    FINDINGS = "findings"
    WORKER_DIED = "worker-died"
    ERROR = "error"
    UNKNOWN = "unknown"
    """Nothing was found, but what ran, or a relevant share of it, was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StripRow:
    """One module of the dtype-and-magnitude strip around the origin, in execution order."""

    fqn: str
    cls: str
    dtype: str
    absmax: float | None
    num_nan: int
    num_inf: int
    headroom: float | None
    is_origin: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One scenario, diagnosed and treated."""

    name: str
    status: Status
    headline: str
    findings: tuple[Finding, ...] = ()
    trials: tuple[Trial, ...] = ()
    before: RunSummary | None = None
    trace_usable: bool = True
    """Whether the run left a trace in which anything could be read."""
    reference: RunSummary | None = None
    strip: tuple[StripRow, ...] = ()
    observer: Observer = field(default_factory=lambda: Observer(bitwise_equal=None, reason="not compared"))
    coverage: tuple[str, ...] = ()
    """What was not watched and why."""
    measured: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """For each kind of thing that ran how many were measured, and how many ran."""
    bisection: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    scenario: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    expectation: str = ""
    """Whether the scenario's expectation came true, in words; empty without one."""
    expectation_met: bool | None = None
    next_command: str = ""
    pictures: tuple[Picture, ...] = ()
    """What the traces of the runs look like, for formats that can show it; not part of report.json."""
