"""SARIF: each finding at a line of the program's source."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_builders import everything, healthy, hostile, mismatch, overflow

from dtypedoctor.diagnosis.rule import Excerpt, Severity
from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.to_json import Report
from dtypedoctor.report.to_sarif import render_sarif

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from annotations import annotations

SCHEMA = os.environ.get("SARIF_SCHEMA", "")
OWN = Excerpt(file="sub/train.py", line=11, function="forward", text="        return self.head(y * y)")


def sarif(report: Report) -> dict[str, Any]:
    log = json.loads(render_sarif(run_document(report)))
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    return run


@pytest.mark.skipif(not SCHEMA, reason="SARIF_SCHEMA does not name OASIS' sarif-schema-2.1.0.json")
@pytest.mark.parametrize("report", everything(), ids=lambda report: report.name[:30])
def test_the_log_meets_the_official_schema(report: Report) -> None:
    """URIs and unique items included."""
    schema = json.loads(Path(SCHEMA).read_text(encoding="utf-8"))
    checker = jsonschema.FormatChecker()
    jsonschema.Draft4Validator(schema, format_checker=checker).validate(json.loads(render_sarif(run_document(report))))


def test_what_the_scenario_announces_is_a_note() -> None:
    """A gate that counts errors passes where the scenario fails as expected."""
    assert {result["level"] for result in sarif(overflow())["results"]} == {"note"}


def test_an_edit_is_a_fix_of_a_whole_line() -> None:
    """An editor that applies it gets the new line."""
    (fix,) = sarif(overflow())["results"][0]["fixes"]
    (change,) = fix["artifactChanges"]
    old = overflow().do_this[0].edits[0].old
    assert change["artifactLocation"]["uri"] == "train.py"
    assert change["replacements"] == [
        {
            "deletedRegion": {"startLine": 7, "startColumn": 1, "endLine": 7, "endColumn": len(old) + 1},
            "insertedContent": {"text": "model = model.bfloat16()"},
        }
    ]


def annotated(report: Report) -> list[str]:
    """The lines that the GitHub Action prints of a report."""
    return "\n".join(annotations(json.loads(render_sarif(run_document(report))))).splitlines()


def test_annotations_are_commands_of_the_runner() -> None:
    """File and line as properties, the message behind them; colons and commas in a property are escaped."""
    (line,) = annotated(replace(overflow(), excerpts=(replace(OWN, file="a,b:c d.py"),), expectation_met=None))
    assert line.startswith("::error file=a%2Cb%3Ac d.py,line=11,title=float16-overflow::")
    warning = replace(mismatch().findings[0], severity=Severity.WARNING)
    (line,) = annotated(replace(mismatch(), findings=(warning,)))
    assert line.startswith("::warning file=modeling_llama.py,line=67,")
    (line,) = annotated(healthy())
    assert line.startswith("::notice title=dtypedoctor::HEALTHY: 8 of 8 steps")


@given(st.text())
def test_no_text_becomes_a_command(text: str) -> None:
    """One line per finding, whatever its texts are: a line break would begin a command of somebody else's."""
    finding = replace(mismatch().findings[0], summary=text, source=text, fqn=text)
    lines = annotated(replace(mismatch(), findings=(finding,)))
    assert [line.partition(" ")[0] for line in lines] == ["::error"]


def test_hostile_names_stay_inside_of_the_log() -> None:
    """Nothing invisible, and ASCII only."""
    text = render_sarif(run_document(hostile()))
    assert text.isascii()
    assert "\\u202e" not in text.replace("\\\\u202e", "")
