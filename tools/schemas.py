"""Writes ``docs/scenario.schema.json``, the JSON Schema of scenario files, from the scenario's model.

python tools/schemas.py

That of report.json is ``dtypedoctor/report/schema.json``, written by hand and held against the report's classes by tests/unit/test_report_json.py.
"""

import json
from pathlib import Path

from dtypedoctor.lab.scenarios.loading import json_schema

PLACE = Path(__file__).resolve().parents[1] / "docs" / "scenario.schema.json"


def text() -> str:
    """The file as it should be."""
    return json.dumps(json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    PLACE.write_text(text(), encoding="utf-8")
