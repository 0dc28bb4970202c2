"""Reports that carry a secret in every field."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from report_builders import mismatch, overflow

from dtypedoctor.report.to_json import Report


def rich_report() -> Report:
    """A report with something in every field that formats show."""
    base = overflow()
    return replace(
        base,
        findings=(*base.findings, *mismatch().findings),
        bisection={"culprits": ["model.layers.0"], "corrections": ["c"], "probes": 3, "one_minimal": True,
                   "verdicts": [{"mode": "m", "outcome": "fail", "phase": "forward", "fqn": "model", "absmax": 2.0}]},
    )  # fmt: skip


def planted(value: Any, secret: str) -> Any:
    """``value`` with ``secret`` added to every text in it, keys included; enums and registered words stay."""
    if isinstance(value, Enum):
        return value
    if isinstance(value, str):
        return f"{value} {secret}"
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: planted(getattr(value, f.name), secret) for f in fields(value)})
    if isinstance(value, Mapping):
        return {planted(key, secret): planted(item, secret) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(planted(item, secret) for item in value)
    return value


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif is_dataclass(value):
        for f in fields(value):
            yield from texts(getattr(value, f.name))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(key)
            yield from texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts(item)
