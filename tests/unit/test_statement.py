"""From a statement to a finding: remedies and references follow from its id, the order of findings from their severity."""

import re

import pytest

from dtypedoctor.diagnosis import finding_ids
from dtypedoctor.diagnosis.rule import Confidence, Finding, Severity, most_severe_first
from dtypedoctor.rules import Statement, make_finding


def said(name: str = "float16-overflow", severity: Severity = Severity.ERROR) -> Statement:
    return Statement(id=name, severity=severity, summary="It fails.", cause="Because.", evidence=("Measured.",))


def test_every_finding_has_public_references(subtests: pytest.Subtests) -> None:
    """Threads, pull requests, commits or files that can be looked up, whatever detector says it."""
    for finding in finding_ids():
        with subtests.test(finding):
            references = make_finding(said(finding), phase=None).references
            assert references
            for address in references:
                assert re.fullmatch(
                    r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull|discussions)/\d+(#\S+)?", address
                ), address


def test_findings_are_ordered_by_severity_and_keep_their_order_otherwise() -> None:
    """Errors, warnings, information."""

    def finding(name: str, severity: Severity) -> Finding:
        return Finding(id=name, severity=severity, confidence=Confidence.LIKELY, summary="", cause="")

    mixed = [finding("a", Severity.INFO), finding("b", Severity.WARNING), finding("c", Severity.ERROR),
             finding("d", Severity.WARNING), finding("e", Severity.ERROR)]  # fmt: skip
    assert [one.id for one in most_severe_first(mixed)] == ["c", "e", "b", "d", "a"]
