"""JUnit XML, so that a scenario is a regression gate in any CI that reads test results.

What fails there is what makes the command line exit with something else than 0: findings that no expectation announced, an
expectation that did not come true, a worker that died. A remedy that was not tried, or tried without success, is skipped.
"""

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.report.facts import CONFIDENCE, place
from dtypedoctor.report.model import Outcome, Report, RunSummary, Status, Trial
from dtypedoctor.report.remedy_lines import outcome_words
from dtypedoctor.report.text import one_line, paragraphs

__all__ = ["merge_junit", "render_junit"]


def render_junit(report: Report) -> str:
    """The report as a JUnit document with one test suite."""
    return merge_junit([report])


def merge_junit(reports: Sequence[Report]) -> str:
    """Several reports as one JUnit document, one test suite each."""
    suites = [_suite(report) for report in reports]
    root = ET.Element("testsuites", name="dtypedoctor")
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in suites)))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in suites):.3f}")
    root.extend(suites)
    ET.indent(root)
    return f"<?xml version='1.0' encoding='UTF-8'?>\n{ET.tostring(root, encoding='unicode')}\n"


def _suite(report: Report) -> ET.Element:
    name = one_line(report.name)
    cases = [_run(report), *(_finding(report, finding) for finding in report.findings)]
    cases += [_trial(trial) for trial in report.trials]
    if report.expectation_met is not None:
        cases.append(_expectation(report))
    for case in cases:
        case.set("classname", f"dtypedoctor.{name}")
    suite = ET.Element("testsuite", name=name, tests=str(len(cases)))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")
    suite.extend(cases)
    return suite


def _run(report: Report) -> ET.Element:
    case = _case("run", report.before)
    if report.status in (Status.WORKER_DIED, Status.ERROR, Status.UNKNOWN) and report.expectation_met is not True:
        error = ET.SubElement(case, "error", type=report.status.value, message=one_line(report.headline, 500))
        error.text = paragraphs(report.headline)
    else:
        ET.SubElement(case, "system-out").text = paragraphs(report.headline)
    return case


def _finding(report: Report, finding: Finding) -> ET.Element:
    case = _case(f"finding {one_line(finding.id)}", None)
    text = "\n".join(_finding_lines(finding))
    if finding.severity is Severity.INFO or report.expectation_met is True:
        ET.SubElement(case, "system-out").text = text
    else:
        failure = ET.SubElement(case, "failure", type=one_line(finding.id), message=one_line(finding.summary, 500))
        failure.text = text
    return case


def _finding_lines(finding: Finding) -> list[str]:
    facts = [f"{label}: {value}" for label, value in place(finding)]
    evidence = [f"- {one_line(item, 600)}" for item in finding.evidence]
    verdict = f"{finding.severity}, {CONFIDENCE[finding.confidence]}"
    return [one_line(finding.summary, 600), verdict, *facts, f"cause: {paragraphs(finding.cause)}", *evidence]


def _trial(trial: Trial) -> ET.Element:
    case = _case(f"remedy {one_line(trial.remedy)}", trial.run)
    words = f"{outcome_words(trial)}: {one_line(trial.reason, 600)}"
    if trial.outcome is Outcome.FIXED:
        ET.SubElement(case, "system-out").text = words
    else:
        ET.SubElement(case, "skipped", message=words)
    return case


def _expectation(report: Report) -> ET.Element:
    case = _case("expectation", None)
    text = one_line(report.expectation, 600)
    if report.expectation_met:
        ET.SubElement(case, "system-out").text = text
    else:
        ET.SubElement(case, "failure", type="expectation", message=text)
    return case


def _case(name: str, run: RunSummary | None) -> ET.Element:
    seconds = (run.step_time or 0.0) * run.steps_completed if run else 0.0
    return ET.Element("testcase", name=name, time=f"{seconds:.3f}")
