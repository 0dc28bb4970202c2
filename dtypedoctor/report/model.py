"""The Report: everything that is said about a scenario, as one value. Renderers decide nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dtypedoctor.diagnosis.rule import Advice, Excerpt, Finding
from dtypedoctor.examination.results import Observer, Outcome, Parity, RunSummary, Trial

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
    do_this: tuple[Advice, ...] = ()
    """What to do about each finding, in their order."""
    excerpts: tuple[Excerpt, ...] = ()
    """The lines of source at which the first finding shows: the program's own, then that of the library where it raised."""
    noticed: str = ""
    """Where the program itself showed the failure: a loss that is not finite, the exception that ended it; empty where it showed nothing."""
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
    capsule: Mapping[str, Any] | None = None
    """The failing call that was kept beside the run (``directory``, ``module``, ``class``, ``bytes``, ``holds``, ``allow_code``, ``script``), or ``why``
    it was not; None where nothing failed or the run left no process to catch it in."""
    replay: Mapping[str, Any] | None = None
    """The call of a capsule that was made again (``module``, ``class``, ``capsule``, ``dtype``, ``op`` that failed in the run, ``verdict``: whether it
    comes to the same here, as a sentence, empty in another dtype); None for a run of anything else."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    scenario: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    expectation: str = ""
    """Whether the scenario's expectation came true, in words; empty without one."""
    expectation_met: bool | None = None
    next_command: str = ""
    rerun: str = ""
    """With which options another run of the script would tell more, and what; empty where it would not."""

    @property
    def asks_for_edit(self) -> bool:
        """Whether the first screen shows a change to make; not of a note on a healthy run, which may stay as it is."""
        return self.status is not Status.HEALTHY and bool(self.do_this) and self.do_this[0].is_shown
