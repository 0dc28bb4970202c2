"""``report.json``: the contract that scripts lean on, written, read and described by a JSON Schema."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import resources
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dtypedoctor import unpatched
from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import parse_json
from dtypedoctor.plugins import Format
from dtypedoctor.report.document import Document
from dtypedoctor.report.model import SCHEMA, Report, Trial

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
    tried = [advice.tried for advice in report.do_this]
    for position, finding in enumerate(document["findings"]):
        finding["tried"] = tried[position] if position < len(tried) else None
    document["trials"] = [_trial(trial) for trial in report.trials]
    return document


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
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
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
