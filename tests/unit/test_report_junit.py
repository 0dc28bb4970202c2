"""JUnit XML for a CI that gates on it."""

from dataclasses import replace
from xml.etree import ElementTree as ET

from goldens import assert_golden
from hypothesis import given
from hypothesis import strategies as st
from report_builders import everything, healthy, hostile, mismatch, overflow

from dtypedoctor.lab.cli.matrix import matrix_document, not_run_report, refused_report, row_of
from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.to_json import Report
from dtypedoctor.report.to_junit import render_junit


def merged(reports: list[Report]) -> str:
    rows = [row_of(report, exit_code=0, seconds=1.0, path="report.json") for report in reports]
    return render_junit(matrix_document(rows, reports, exit_code=0))


def cases(report: Report) -> dict[str, str]:
    """What became of each test case, by its name."""
    suite = ET.fromstring(render_junit(run_document(report)))[0]
    return {case.get("name", ""): "pass" if case[0].tag == "system-out" else case[0].tag for case in suite}


def test_the_document_reads_as_expected() -> None:
    """Suites, cases, messages and counts of four reports in one document."""
    assert_golden("junit.xml", merged(everything()[:4]))


def test_findings_fail_unless_they_are_expected() -> None:
    """A scenario that fails as it says and is cured as it says passes the gate."""
    assert cases(mismatch()) == {"run": "pass", "finding norm-promotes-to-float32": "failure"}
    assert set(cases(overflow()).values()) == {"pass", "skipped"}
    missed = replace(overflow(), expectation_met=False)
    assert cases(missed)["expectation"] == "failure"
    assert cases(missed)["finding float16-overflow"] == "failure"


def test_a_scenario_that_was_not_run_is_skipped_with_the_reason() -> None:
    """Ctrl-C, or the end of a job's time, is no failure of a scenario that had not begun; one that could not be run is."""
    suite = ET.fromstring(render_junit(run_document(not_run_report("later"))))[0]
    assert [(case[0].tag, case[0].get("message")) for case in suite] == [("skipped", "Not run: interrupted.")]
    assert cases(refused_report("broken", "no such model")) == {"run": "error"}


def test_hostile_names_do_not_break_the_document() -> None:
    """Control characters that XML cannot hold are escaped like everywhere else."""
    text = render_junit(run_document(hostile()))
    assert "\x1b" not in text
    assert "\\x1b" in ET.fromstring(text)[0].get("name", "")


@given(st.text())
def test_any_text_makes_a_document_that_parses(text: str) -> None:
    """XML 1.0 has no way to write most control characters, so none may reach it."""
    report = replace(healthy(), name=text, headline=text, expectation=text, expectation_met=False)
    ET.fromstring(render_junit(run_document(report)).encode())
