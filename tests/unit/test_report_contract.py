"""The page about report.json: its example is what a recorded run gives, and its words are those of the schema."""

import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from recorded import play

import dtypedoctor
from dtypedoctor.report.build import build_report, write_report
from dtypedoctor.report.first_screen import brief
from dtypedoctor.report.to_json import Report, json_schema, render_data, render_json

PAGE = Path(__file__).parents[2] / "docs" / "report-json.md"
_EXAMPLE = re.compile(
    r"(?<=<!-- example: made by tests/unit/test_report_contract.py -->\n\n```json\n).*?(?=```\n)", re.DOTALL
)
_SHOWN = (
    "id",
    "severity",
    "confidence",
    "op",
    "phase",
    "step",
    "dtype",
    "source",
    "effect",
    "where",
    "tried",
    "proven_by",
)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    """The report of a recorded run whose float16 overflows."""
    treatment = play("overflow_gated_product_llama", tmp_path / "recorded")
    return build_report(treatment, command="", files={}, next_command="dtypedoctor explain float16-overflow")


def example(report: Report) -> str:
    """The part of ``report.json`` that the page shows."""
    document: dict[str, Any] = json.loads(render_json(report))
    finding = {key: document["findings"][0][key] for key in _SHOWN}
    shown = {key: document[key] for key in ("schema", "status", "headline")} | {"findings": [finding]}
    return json.dumps(shown | {key: document[key] for key in ("measured", "next_command")}, indent=1) + "\n"


def test_the_example_of_the_page_is_what_a_run_gives(report: Report) -> None:
    """Where it is not, UPDATE_GOLDENS=1 writes it anew."""
    text = PAGE.read_text("utf-8")
    if os.environ.get("UPDATE_GOLDENS") == "1":
        PAGE.write_text(text := _EXAMPLE.sub(lambda _: example(report), text), "utf-8")
    assert _EXAMPLE.findall(text) == [example(report)]
    jsonschema.validate(json.loads(render_json(report)), json_schema())


def test_the_page_names_the_words_of_the_schema_and_the_keys_of_the_brief_report(report: Report) -> None:
    """Every word of ``status``, ``severity``, ``confidence`` and ``effect``; and it has at most 800 words."""
    text, schema = PAGE.read_text("utf-8"), json_schema()
    finding = schema["$defs"]["finding"]["properties"]
    words = [
        *schema["properties"]["status"]["enum"],
        *(word for key in ("severity", "confidence", "effect") for word in finding[key]["enum"]),
    ]
    words += list(json.loads(render_data(brief(report))))
    assert [word for word in words if f"`{word}`" not in text] == []
    assert len(text.split()) <= 800


def test_a_run_is_diagnosed_from_python_as_a_typed_value(report: Report, tmp_path: Path) -> None:
    """By its folder or its file; the same that the command line shows."""
    write_report(tmp_path, report)
    for place in (tmp_path, str(tmp_path / "report.json")):
        read = dtypedoctor.diagnose(place)
        assert isinstance(read, dtypedoctor.Report)
        assert [finding.id for finding in read.findings] == ["float16-overflow"]


def test_callbacks_of_trainers_are_among_the_integrations() -> None:
    """Under a name of their own; the old names are kept."""
    from dtypedoctor import integrations

    assert integrations.TrainerCallback is dtypedoctor.DtypeDoctorCallback
    with pytest.raises(AttributeError, match="no attribute 'Keras'"):
        _ = integrations.Keras
