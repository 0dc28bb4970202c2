"""JUnit XML, which makes a scenario a regression gate in any CI that reads test results: one case for each check of a document."""

from xml.etree import ElementTree as ET

from dtypedoctor.plugins import Format
from dtypedoctor.report.document import Check, Document, Outcome
from dtypedoctor.text import one_line, paragraphs

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


FORMAT = Format(name="junit", suffix=".xml", render=render_junit)
