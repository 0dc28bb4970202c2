"""What is said about a bisection, in every format."""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from bisections import found
from report_builders import overflow
from rich.console import Console

from dtypedoctor.report.document import Document
from dtypedoctor.report.run_document import (
    bisection_document,
    bisection_part,
    bisection_summary,
)
from dtypedoctor.report.to_html import render_html
from dtypedoctor.report.to_json import Report, from_json, json_schema, plain, render_json
from dtypedoctor.report.to_md import render_markdown
from dtypedoctor.report.to_terminal import print_document


def report(**changes: Any) -> Report:
    bisection = found(**changes)
    return replace(overflow(), headline=bisection["answer"], bisection=bisection)


def printed(shown: Report, width: int = 100) -> str:
    """The page at a prompt that is so wide."""
    return printed_document(bisection_document(shown), width)


def printed_document(document: Document, width: int = 100) -> str:
    stream = io.StringIO()
    print_document(document, Console(file=stream, width=width, no_color=True))
    return stream.getvalue()


def summary(**changes: Any) -> dict[str, str]:
    """The labelled values."""
    return dict(bisection_summary(found(**changes)))


def test_the_answer_comes_first_at_the_prompt() -> None:
    """Then culprits, corrections, verdicts, remedy."""
    page = printed(report())
    places = [page.index(part) for part in ("Keeping only", "culprits", "verdict of", "fix, ", "Can this be trusted?")]
    assert places == sorted(places)
    assert places[0] == 0


def test_a_bisection_says_its_doubts() -> None:
    """Flaky runs, probes that failed otherwise, treatment that hurts, notes."""
    told = summary(flaky=["with nothing treated: fail, then pass"], unresolved=2, monotone=False, note="luck")
    assert told["flaky"].endswith("fail, then pass")
    assert told["unresolved"] == "2 probes failed differently"
    assert "a healthy run failed with more modules" in told["not monotone"]
    assert told["note"] == "luck"
    assert not {"flaky", "unresolved", "not monotone", "note"} & summary().keys()


@pytest.mark.parametrize("render", [render_markdown, render_html, printed_document])
def test_every_format_has_the_same_facts(render: Callable[[Document], str]) -> None:
    """Culprit, correction, verdicts, remedy and reproduction."""
    text = render(bisection_document(report()))
    for words in (
        "model.layers.0.mlp::self",
        "mlp-float32 (2 offered)",
        "loss scale",
        "43,392",
        "id: mlp-float32",
        "repro.py",
    ):
        assert words in text
    assert bisection_part(replace(report(), bisection=None)).blocks == ()


def test_a_bisection_keeps_the_contract_of_report_json_and_can_be_read_back() -> None:
    """As report.json."""
    text = render_json(report())
    shown = from_json(text)
    jsonschema.validate(plain(shown.bisection), json_schema()["$defs"]["bisection"])
    assert shown.bisection == plain(found())
