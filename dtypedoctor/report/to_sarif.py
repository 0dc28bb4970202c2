"""SARIF 2.1.0 for code scanning: each finding at the line of the program's source where it shows."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from dtypedoctor.diagnosis import readable_page, spec_of
from dtypedoctor.diagnosis.rule import Severity
from dtypedoctor.errors import DoctorError
from dtypedoctor.plugins import Format
from dtypedoctor.report.document import Document
from dtypedoctor.text import one_line
from dtypedoctor.version import __version__

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_SOURCE = re.compile(r"(?P<file>.+):(?P<line>[1-9]\d*)")


def render_sarif(document: Document) -> str:
    """Draw the findings as a log of one run, ASCII only: a rule for each finding id with its page, edits as fixes."""
    reports = [part.data() for part in document.parts or (document,)]
    results = [result for report in reports for result in _results(report)]
    rules = list(dict.fromkeys(result["ruleId"] for result in results))
    for result in results:
        result["ruleIndex"] = rules.index(result["ruleId"])
    endings = [one_line(report["before"]["ended"], 400) for report in reports if report.get("before")]
    run = {
        "tool": {"driver": {"name": "dtypedoctor", "version": __version__, "rules": [_rule(name) for name in rules]}},
        "results": results,
        "columnKind": "unicodeCodePoints",
        "properties": {"headline": one_line(document.title, 600), "ended": endings},
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, allow_nan=False) + "\n"


def _rule(name: str) -> dict[str, Any]:
    try:
        spec, page = spec_of(name), readable_page(name)
    except DoctorError:  # the report is of another version, or of a plug-in that is not here
        return {"id": name}
    rule = {
        "id": name,
        "shortDescription": {"text": spec.title},
        "help": {"text": f"dtypedoctor explain {name}", "markdown": page},
        "defaultConfiguration": {"level": _LEVELS[spec.severity]},
        "properties": {"tags": [spec.family.id]},
    }
    # The pages have no address of their own: a public ticket of the same failure has one.
    return rule | ({"helpUri": spec.references[0]} if spec.references else {})


def _results(report: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Draw the findings of a ``report.json``; what its scenario expects is a note, so that a gate passes it."""
    all_advice = report.get("do_this") or ()
    for position, finding in enumerate(report.get("findings") or ()):
        advice = all_advice[position] if position < len(all_advice) else {}
        excerpts = (report.get("excerpts") or ()) if position == 0 else ()
        name, fqn = _text(finding["id"]), finding.get("fqn") or ""
        summary = _text(finding["summary"])
        result = {
            "ruleId": name,
            "level": "note" if report.get("expectation_met") is True else _LEVELS[Severity(finding["severity"])],
            "message": {"text": f"{summary} Do this: {_text(advice['text'])}" if advice.get("text") else summary},
            "locations": _locations(fqn, *_line_of(finding, advice, excerpts)),
            "partialFingerprints": {"finding/v1": _text("|".join((name, fqn, finding.get("op") or "")))},
            "properties": {
                "confidence": finding["confidence"],
                "phase": _text(finding.get("phase") or ""),
                "step": finding.get("step"),
            },
        }
        fixes = _fixes(advice)
        yield result | ({"fixes": fixes} if fixes else {})


def _line_of(
    finding: Mapping[str, Any], advice: Mapping[str, Any], excerpts: Sequence[Mapping[str, Any]]
) -> tuple[str, int]:
    """Find file and line in the program: the first excerpt, else the finding's own line; empty and 0 where none is known."""
    if excerpts:
        return excerpts[0]["file"], excerpts[0]["line"]
    edits = advice.get("edits") or ()
    known = _SOURCE.fullmatch(finding.get("source") or "")
    if known is None:
        return (edits[0]["file"], edits[0]["line"]) if edits else ("", 0)
    # A finding's source may be the bare name of the file; an edit has its path.
    ends = PurePosixPath(known["file"]).parts
    whole = [edit["file"] for edit in edits if PurePosixPath(edit["file"]).parts[-len(ends) :] == ends]
    return (whole[0] if whole else known["file"]), int(known["line"])


def _locations(fqn: str, file: str, line: int) -> list[dict[str, Any]]:
    location: dict[str, Any] = {}
    if file:
        location["physicalLocation"] = {"artifactLocation": _artifact(file), "region": {"startLine": line}}
    if fqn:
        location["logicalLocations"] = [{"fullyQualifiedName": one_line(fqn), "kind": "module"}]
    return [location] if location else []


def _fixes(advice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Draw the edits of the program's source as one fix: each replaces a whole line, or takes it away."""
    by_file: dict[str, list[dict[str, Any]]] = {}
    for edit in advice.get("edits") or ():
        where = {
            "startLine": edit["line"],
            "startColumn": 1,
            "endLine": edit["line"] if edit["new"] else edit["line"] + 1,
            "endColumn": len(edit["old"]) + 1 if edit["new"] else 1,
        }
        replacement = {"deletedRegion": where, "insertedContent": {"text": edit["new"]}}
        by_file.setdefault(edit["file"], []).append(replacement)
    changes = [{"artifactLocation": _artifact(file), "replacements": of_file} for file, of_file in by_file.items()]
    return [{"description": {"text": _text(advice["text"])}, "artifactChanges": changes}] if changes else []


def _artifact(file: str) -> dict[str, Any]:
    """Write a path as a relative reference, which a colon in its first part would make an absolute one."""
    address = quote(_text(file))
    return {"uri": address} if file.startswith("/") else {"uri": address, "uriBaseId": "%SRCROOT%"}


def _text(text: str) -> str:
    return one_line(text, 600)


FORMAT = Format(name="sarif", suffix=".sarif", render=render_sarif)
