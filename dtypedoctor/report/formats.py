"""The formats that come with dtypedoctor, JUnit XML among them. A new one is a function of a document and a line here.

JUnit makes a scenario a regression gate in any CI that reads test results: one case for each check of a document.
"""

from dataclasses import replace
from xml.etree import ElementTree as ET

from dtypedoctor.errors import UsageError
from dtypedoctor.interruptions import contained
from dtypedoctor.plugins import Format, known, label_of, registered
from dtypedoctor.report.document import Check, Document, Outcome
from dtypedoctor.report.text import one_line, paragraphs
from dtypedoctor.report.to_html import render_html
from dtypedoctor.report.to_json import render_data
from dtypedoctor.report.to_markdown import render_job_summary, render_markdown
from dtypedoctor.scenario.problems import did_you_mean

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


FORMATS = (
    Format(name="md", suffix=".md", render=render_markdown),
    Format(name="html", suffix=".html", render=render_html, shows_runs=True),
    Format(name="json", suffix=".json", render=render_data),
    Format(name="junit", suffix=".xml", render=render_junit),
    Format(name="github", suffix=".md", render=render_job_summary),
)


def format_named(name: str) -> Format:
    """The format of that name, of dtypedoctor or else of a plug-in.

    Raises:
        UsageError: there is none.
    """
    found = registered(Format).get(name)
    if found is None:
        meant = did_you_mean(name, registered(Format))
        raise UsageError(f"--format: there is no format {name!r}{meant}", f"At the prompt: terminal. {known(Format)}")
    return _shielded(found) if label_of(Format, name) else found


def _shielded(format: Format) -> Format:
    """A plug-in's format, whose ``render`` raises UsageError where the plug-in's own raises or returns no text."""

    def render(document: Document) -> str:
        with contained() as ours:
            text = format.render(document)
            if not isinstance(text, str):
                raise TypeError(f"render returned {type(text).__name__}, not str")
            return text
        raise UsageError(
            f"--format {format.name}: {label_of(Format, format.name)} failed: {type(ours.error).__name__}: {ours.error}",
            "`dtypedoctor report` shows a saved run in another format, e.g. --format md.",
        ) from ours.error

    return replace(format, render=render)
