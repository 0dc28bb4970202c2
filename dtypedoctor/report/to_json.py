"""The Report: everything that is said about a scenario, as one value; and ``report.json``, the contract that scripts lean on: the same, written, read and
described by a JSON Schema. Renderers decide nothing.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from importlib import resources
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dtypedoctor import unpatched
from dtypedoctor.diagnosis import spec_of
from dtypedoctor.diagnosis.rule import (
    DTYPE_MISMATCH,
    LOSS_SCALING,
    NON_FINITE,
    SILENT,
    STAYS,
    Advice,
    Excerpt,
    Finding,
    Severity,
)
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.results import Observer, Outcome, Parity, RunSummary, Trial
from dtypedoctor.foreign_files import parse_json
from dtypedoctor.plugins import Format
from dtypedoctor.report.document import Document
from dtypedoctor.report.error_budget import BudgetRow
from dtypedoctor.report.precisions import PrecisionRow

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
    error_budget: tuple[BudgetRow, ...] = ()
    """Which modules make the rounding error of the loss, where that was asked for."""
    precisions: tuple[PrecisionRow, ...] = ()
    """The dtypes that parameters were asked to have, and had; empty where all is float32."""
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


_HINT = "Give the report.json that dtypedoctor wrote, or run the scenario again."


def render_json(report: Report) -> str:
    """The report as JSON text, ASCII only and ending in a newline.

    NaN and inf, which JSON cannot hold, become null. Every trial carries ``steps_completed``, ``loss`` and ``grad_norm``
    of its run beside ``run`` itself, so that a script need not care whether the run exists.
    """
    return _written(report_data(report))


def from_json(text: str) -> Report:
    """The report that :func:`render_json` wrote; unknown keys are ignored.

    Raises:
        UsageError: not JSON, not a report, a field missing or of the wrong type, or a newer schema.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        raise UsageError(f"not a report: {error}", _HINT) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, int):
        raise UsageError("not a report: no schema number", _HINT)
    if schema > SCHEMA:
        raise UsageError(f"this report has schema {schema}, newer than {SCHEMA}", "Update dtypedoctor to read it.")
    try:
        return TypeAdapter(Report).validate_json(text, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"])) or "the document"
        raise UsageError(f"not a report: {place}: {problem['msg']}", _HINT) from error


def report_data(report: Report) -> dict[str, Any]:
    """What ``report.json`` holds."""
    document = {"schema": SCHEMA, **plain(report)}
    for position, (finding, written) in enumerate(zip(report.findings, document["findings"], strict=True)):
        advice = report.do_this[position] if position < len(report.do_this) else None
        written["tried"] = advice.tried if advice is not None and advice.is_shown else None
        # What a failure does to the program, for programs: by the family of the finding; `none` where it is a note
        written["effect"] = (
            "none" if finding.severity is Severity.INFO else _EFFECTS.get(spec_of(finding.id).family.id, "other")
        )
        written["where"] = _where(finding, report.excerpts if position == 0 else (), advice)
    document["trials"] = [_trial(trial) for trial in report.trials]
    return document


_EFFECTS = {
    DTYPE_MISMATCH.id: "raises",
    LOSS_SCALING.id: "not-trained",
    NON_FINITE.id: "inf-or-nan",
    SILENT.id: "wrong-values",
}


def _where(finding: Finding, excerpts: Sequence[Excerpt], advice: Advice | None) -> dict[str, str | None]:
    """The program's own line and the library's, as ``file.py:12``; where a finding has no line, that of its edit. None for what is not known."""
    own = [f"{edit.file}:{edit.line}" for edit in (advice.edits if advice is not None else ())]
    shown = [f"{excerpt.file}:{excerpt.line}" for excerpt in excerpts]  # the program's, then the library's
    source = finding.source
    if source is not None and "/" in source:  # a library's path begins at the top of its package
        return {"user": next(iter(shown or own), None), "library": source}
    return {"user": source or next(iter(shown or own), None), "library": shown[1] if len(shown) > 1 else None}


def render_data(document: Document) -> str:
    """What programs read of a document, as JSON text like that of :func:`render_json`."""
    return _written(document.data())


def _written(data: Mapping[str, Any]) -> str:
    return unpatched.to_json(data, indented=True) + "\n"


def _trial(trial: Trial) -> dict[str, Any]:
    run = trial.run
    return {
        **plain(trial),
        "steps_completed": run.steps_completed if run else None,
        "loss": plain(run.loss) if run else [],
        "grad_norm": plain(run.grad_norm) if run else [],
    }


def plain(value: Any) -> Any:
    """``value`` in terms of what JSON has: enums as their text, NaN and inf as None, whatever is unknown as its ``str``."""
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value) if STAYS not in f.metadata}
    if isinstance(value, Mapping):
        return {_unicode(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return _plain_scalar(value)


def _plain_scalar(value: Any) -> str | float | None:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, int):
        return value
    return _unicode(str(value))


def _unicode(text: str) -> str:
    # File names that are not UTF-8 reach Python as lone surrogates, which JSON readers refuse.
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that every ``report.json`` of this version meets."""
    schema: dict[str, Any] = json.loads(
        resources.files("dtypedoctor.report").joinpath("schema.json").read_text("utf-8")
    )
    return schema


FORMAT = Format(name="json", suffix=".json", render=render_data)
