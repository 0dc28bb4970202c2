"""Documents for CI systems: JUnit XML (test results), SARIF 2.1.0 (code scanning) and annotations of GitHub Actions.

JUnit makes a scenario a regression gate in any CI that reads test results: one case for each check of a document. SARIF and annotations
put each finding at the line of the program's source where it shows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree as ET

from dtypedoctor import __version__
from dtypedoctor.diagnosis.registry import readable_page, spec_of
from dtypedoctor.diagnosis.rule import Severity
from dtypedoctor.errors import DoctorError
from dtypedoctor.patterns import regex
from dtypedoctor.report.document import Check, Document, Outcome
from dtypedoctor.report.text import one_line, paragraphs
from dtypedoctor.values import dataclass

_TAGS = {
    Outcome.PASSED: "system-out",
    Outcome.FAILED: "failure",
    Outcome.ERROR: "error",
    Outcome.SKIPPED: "skipped",
}


def render_junit(document: Document) -> str:
    """The checks as a JUnit document: one test suite, or one for each document that this one sums up."""
    suites = [_suite(part) for part in (document.parts or ([document] if document.checks else []))]
    root = ET.Element("testsuites", name="dtypedoctor")
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in suites)))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in suites):.3f}")
    root.extend(suites)
    ET.indent(root)
    return f"<?xml version='1.0' encoding='UTF-8'?>\n{ET.tostring(root, encoding='unicode')}\n"


def _suite(document: Document) -> ET.Element:
    name, checks = one_line(document.name), document.checks
    suite = ET.Element("testsuite", name=name, tests=str(len(checks)))
    for attribute, outcome in (("failures", Outcome.FAILED), ("errors", Outcome.ERROR), ("skipped", Outcome.SKIPPED)):
        suite.set(attribute, str(sum(check.outcome is outcome for check in checks)))
    suite.set("time", f"{sum(round(check.seconds, 3) for check in checks):.3f}")
    suite.extend(_case(check, name) for check in checks)
    return suite


def _case(check: Check, suite: str) -> ET.Element:
    case = ET.Element(
        "testcase", name=one_line(check.name), time=f"{check.seconds:.3f}", classname=f"dtypedoctor.{suite}"
    )
    told = ET.SubElement(case, _TAGS[check.outcome])
    if check.outcome is not Outcome.PASSED:
        told.attrib |= {"type": one_line(check.kind)} if check.kind else {}
        told.set("message", one_line(check.message, 600))
    told.text = paragraphs(check.text) or None
    return case


_SOURCE = regex(r"(?P<file>.+):(?P<line>[1-9]\d*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A finding of ``report.json``, and where to show it.

    Attributes:
        finding: its fields.
        advice: what to do about it, as ``do_this`` of the report has it; empty where it has none.
        file, line: path relative to the working directory of the run, and number from 1; empty and 0 where no line is known.
        expected: whether the scenario announced it.
    """

    finding: Mapping[str, Any]
    advice: Mapping[str, Any]
    file: str
    line: int
    expected: bool


def _placed(document: Document) -> Iterator[_Placed]:
    """The findings of a document, or of the documents that it sums up."""
    for part in document.parts or (document,):
        data = part.data()
        advice = data.get("do_this") or ()
        for position, finding in enumerate(data.get("findings") or ()):
            mine = advice[position] if position < len(advice) else {}
            excerpts = (data.get("excerpts") or ()) if position == 0 else ()
            file, line = _line_of(finding, mine, excerpts)
            yield _Placed(
                finding=finding, advice=mine, file=file, line=line, expected=data.get("expectation_met") is True
            )


def _line_of(
    finding: Mapping[str, Any], advice: Mapping[str, Any], excerpts: Sequence[Mapping[str, Any]]
) -> tuple[str, int]:
    """The program's own line: the first excerpt; else the finding's line, whose file is named in full where an edit does that."""
    if excerpts:
        return excerpts[0]["file"], excerpts[0]["line"]
    edits = advice.get("edits") or ()
    known = _SOURCE.fullmatch(finding.get("source") or "")
    if known is None:
        return (edits[0]["file"], edits[0]["line"]) if edits else ("", 0)
    ends = PurePosixPath(known["file"]).parts
    whole = [edit["file"] for edit in edits if PurePosixPath(edit["file"]).parts[-len(ends) :] == ends]
    return (whole[0] if whole else known["file"]), int(known["line"])


_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def render_sarif(document: Document) -> str:
    """The findings as a SARIF 2.1.0 log, ASCII only: one run; a rule for each finding id with its page; edits as fixes."""
    placed = list(_placed(document))
    ids = list(dict.fromkeys(_text(one.finding["id"]) for one in placed))
    driver = {"name": "dtypedoctor", "version": __version__, "rules": [_rule(name) for name in ids]}
    run = {
        "tool": {"driver": driver},
        "results": [_result(one, ids) for one in placed],
        "columnKind": "unicodeCodePoints",
        "properties": {"headline": one_line(document.title, 600), "ended": _ends(document)},
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, allow_nan=False) + "\n"


def _ends(document: Document) -> list[str]:
    """How each run ended."""
    runs = (part.data().get("before") for part in document.parts or (document,))
    return [one_line(run["ended"], 400) for run in runs if run]


def _rule(name: str) -> dict[str, Any]:
    try:
        spec, text = spec_of(name), readable_page(name)
    except DoctorError:  # the report is of another version, or of a plug-in that is not here
        return {"id": name}
    rule = {
        "id": name,
        "shortDescription": {"text": spec.title},
        "help": {"text": f"dtypedoctor explain {name}", "markdown": text},
        "defaultConfiguration": {"level": _LEVELS[spec.severity]},
        "properties": {"tags": [spec.family.id]},
    }
    # The pages have no address of their own: a public ticket of the same failure has one.
    return rule | ({"helpUri": spec.references[0]} if spec.references else {})


def _result(one: _Placed, ids: Sequence[str]) -> dict[str, Any]:
    finding, name = one.finding, _text(one.finding["id"])
    places: list[dict[str, Any]] = []
    if one.file:
        places.append(
            {"physicalLocation": {"artifactLocation": _artifact(one.file), "region": {"startLine": one.line}}}
        )
    if finding.get("fqn"):
        module = [{"fullyQualifiedName": one_line(finding["fqn"]), "kind": "module"}]
        places[:1] = [(places[0] if places else {}) | {"logicalLocations": module}]
    result = {
        "ruleId": name,
        "ruleIndex": ids.index(name),
        "level": "note" if one.expected else _LEVELS[Severity(finding["severity"])],
        "message": {"text": _message(one)},
        "locations": places,
        "partialFingerprints": {
            "finding/v1": _text("|".join((name, finding.get("fqn") or "", finding.get("op") or "")))
        },
        "properties": {
            "confidence": finding["confidence"],
            "phase": _text(finding.get("phase") or ""),
            "step": finding.get("step"),
        },
    }
    fixes = _fixes(one.advice)
    return result | ({"fixes": fixes} if fixes else {})


def _fixes(advice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The edits of the program's source as one fix: each replaces a whole line, or takes it away."""
    by_file: dict[str, list[dict[str, Any]]] = {}
    for edit in advice.get("edits") or ():
        where = {
            "startLine": edit["line"],
            "startColumn": 1,
            "endLine": edit["line"] if edit["new"] else edit["line"] + 1,
            "endColumn": len(edit["old"]) + 1 if edit["new"] else 1,
        }
        change = {"deletedRegion": where, "insertedContent": {"text": edit["new"]}}
        by_file.setdefault(edit["file"], []).append(change)
    changes = [{"artifactLocation": _artifact(file), "replacements": done} for file, done in by_file.items()]
    return [{"description": {"text": one_line(advice["text"], 600)}, "artifactChanges": changes}] if changes else []


def _artifact(file: str) -> dict[str, Any]:
    """A path as a relative reference, which a colon in its first part would make an absolute one."""
    address = quote(_text(file))
    return {"uri": address} if file.startswith("/") else {"uri": address, "uriBaseId": "%SRCROOT%"}


def _message(one: _Placed) -> str:
    summary, advice = one_line(one.finding["summary"], 600), one_line(one.advice.get("text") or "", 600)
    return f"{summary} Do this: {advice}" if advice else summary


def _text(text: str) -> str:
    return one_line(text, 600)


_COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def render_annotations(document: Document) -> str:
    """A workflow command of GitHub Actions for each finding, which shows it at its line; without any, a notice with the headline.

    A run shows 10 errors, 10 warnings and 10 notices of a step at most.
    """
    lines = [
        _command("notice" if one.expected else _COMMANDS[Severity(one.finding["severity"])], one)
        for one in _placed(document)
    ]
    title = one_line(document.title, 600)
    return "\n".join(lines or [f"::notice title=dtypedoctor::{_escaped(title)}"]) + "\n"


def _command(word: str, one: _Placed) -> str:
    properties = {"file": one.file, "line": str(one.line)} if one.file else {}
    properties["title"] = one_line(one.finding["id"])
    told = ",".join(f"{name}={_escaped(value, in_property=True)}" for name, value in properties.items())
    return f"::{word} {told}::{_escaped(_message(one))}"


def _escaped(text: str, *, in_property: bool = False) -> str:
    """As the runner reads it back (https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts)."""
    shown = _text(text).replace("%", "%25")
    return shown.replace(":", "%3A").replace(",", "%2C") if in_property else shown
