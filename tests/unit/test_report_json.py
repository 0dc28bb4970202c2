"""report.json: the contract, and reading it back."""

import json
from contextlib import suppress
from dataclasses import fields
from typing import Any

import jsonschema
import pytest
from goldens import assert_golden
from hypothesis import given
from hypothesis import strategies as st
from report_builders import everything, healthy, hostile, mismatch, overflow, worker_died

from dtypedoctor.diagnosis.rule import Finding, Link
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.results import Diagnostic
from dtypedoctor.report.to_json import (
    SCHEMA,
    Parity,
    Report,
    RunSummary,
    StripRow,
    Trial,
    from_json,
    json_schema,
    render_json,
)

PARTS = {
    "link": Link,
    "finding": Finding,
    "run": RunSummary,
    "parity": Parity,
    "trial": Trial,
    "strip": StripRow,
    "diagnostic": Diagnostic,
}


def test_the_schema_is_a_json_schema() -> None:
    """The file in the package is itself valid."""
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("report", [healthy(), overflow(), mismatch(), worker_died()], ids=lambda report: report.name)
def test_every_report_meets_the_contract(report: Report) -> None:
    """What is written validates against the published schema."""
    jsonschema.validate(json.loads(render_json(report)), json_schema())


def test_the_schema_describes_every_field() -> None:
    """Nothing is written that the contract does not name."""
    schema = json_schema()
    assert set(schema["properties"]) == {"schema"} | {f.name for f in fields(Report)}
    for name, cls in PARTS.items():
        besides = {Trial: {"steps_completed", "loss", "grad_norm"}, Finding: {"tried", "effect", "where"}}
        written = {f.name for f in fields(cls)} | besides.get(cls, set())
        assert set(schema["$defs"][name]["properties"]) == written


def test_the_text_is_the_expected_one() -> None:
    """Key order and layout are stable, so that two reports can be compared with diff."""
    assert_golden("overflow.json", render_json(overflow()))


def test_numbers_that_are_not_finite_become_null() -> None:
    """JSON has no NaN; a reader must never meet the invalid token."""

    def refuse(token: str) -> None:
        raise AssertionError(token)

    document = json.loads(render_json(hostile()), parse_constant=refuse)
    assert document["before"]["loss"] == [None, 1.0]
    assert document["bisection"]["verdicts"][0]["absmax"] is None


def test_text_that_is_not_unicode_is_written_as_an_escape() -> None:
    """A file name that is not UTF-8 does not make the report unreadable."""
    text = render_json(hostile())
    assert text.isascii()
    assert from_json(text).environment["lone"] == "\\udcff"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a report"),
        ("[]", "no schema"),
        ('{"schema": "1"}', "no schema"),
        ('{"schema": 1}', "name: Field required"),
        (f'{{"schema": {SCHEMA + 1}}}', "newer than"),
        ("[" * 100_000, "not a report"),
    ],
)
def test_what_is_no_report_is_refused_with_a_reason(text: str, message: str) -> None:
    """Bad input is a user's mistake with a message, never a traceback."""
    with pytest.raises(UsageError, match=message):
        from_json(text)


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here, *(path for key, item in inside for path in paths(item, (*here, key)))]


@given(data=st.data(), value=st.sampled_from([None, -1, 1.5, "text", [], {}, True]))
def test_a_damaged_report_is_read_or_refused_but_never_raises_otherwise(data: st.DataObject, value: Any) -> None:
    """Whatever stands in whatever place, there is a report or a message."""
    document = json.loads(render_json(data.draw(st.sampled_from(everything()[:4]))))
    path = data.draw(st.sampled_from(paths(document)[1:]))
    owner = document
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    with suppress(UsageError):
        assert isinstance(from_json(json.dumps(document)), Report)
