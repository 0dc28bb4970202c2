"""The contract of report.json as a JSON Schema."""

import json
from importlib import resources
from typing import Any

__all__ = ["json_schema"]


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) that every ``report.json`` of this version meets."""
    schema: dict[str, Any] = json.loads(
        resources.files("dtypedoctor.report").joinpath("schema.json").read_text("utf-8")
    )
    return schema
