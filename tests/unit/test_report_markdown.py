"""The report as it is pasted into a GitHub ticket."""

from dataclasses import replace

import pytest
from goldens import assert_golden
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from report_builders import EVIL, everything, hostile, overflow

from dtypedoctor.examination.results import REPLAYED
from dtypedoctor.lab.cli.matrix import matrix_document, row_of
from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.to_json import Report
from dtypedoctor.report.to_md import (
    LIMIT,
    code,
    fenced,
    prose,
    render_markdown,
    size,
    table,
)

ALLOWED_HTML = {"<details>", "</details>", "<code>", "</code>"}
PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
NAMES = ["healthy", "overflow", "mismatch", "worker-died", "hostile"]


def summary(reports: list[Report]) -> str:
    """Several reports as one page."""
    rows = [row_of(report, exit_code=0, seconds=1.0, path="report.json") for report in reports]
    return render_markdown(matrix_document(rows, reports, exit_code=0))


def markup(text: str) -> tuple[set[str], list[int]]:
    """The HTML tags that a renderer would let through, and the number of cells in each table row."""
    tags: set[str] = set()
    rows: list[int] = []
    for token in PARSER.parse(text):
        if token.type == "html_block":
            tags |= {line for line in token.content.split("\n") if line and not line.startswith("<summary>")}
        if token.type == "tr_open":
            rows.append(0)
        if token.type in ("td_open", "th_open"):
            rows[-1] += 1
        for child in token.children or ():
            if child.type == "html_inline":
                tags.add(child.content)
            assert child.type != "image"
            if child.type == "link_open":
                tags.add(f"link to {child.attrs['href']}")
    return tags, rows


def test_the_page_of_several_scenarios_reads_as_expected() -> None:
    """One table of all scenarios, those that fail first, each with its details."""
    assert_golden("summary.md", summary(everything()[:4]))
    assert summary([overflow()]) == summary([overflow()])


@pytest.mark.parametrize("report", everything(), ids=NAMES)
def test_only_our_own_markup_is_markup(report: Report) -> None:
    """A name or message brings no tag, image or link into the page."""
    for text in (render_markdown(run_document(report)), summary([report])):
        tags, _ = markup(text)
        assert tags <= ALLOWED_HTML


@pytest.mark.parametrize("report", everything(), ids=NAMES)
def test_every_table_row_has_as_many_cells_as_its_header(report: Report) -> None:
    """Pipes and line breaks in names never shift a column."""
    text = render_markdown(run_document(report))
    lines = text.split("\n")
    for position, line in enumerate(lines):
        if line.startswith("| ---"):
            assert lines[position - 1].startswith("|"), "a table has a header"
    (_, rows) = markup(text)
    assert sum(rows) == sum(line.count(" | ") + 1 for line in lines if line.startswith("| ") and "---" not in line)


def endless(report: Report) -> Report:
    """Forty findings, sixty trials, and everything else by the hundred."""
    finding = report.findings[0]
    finding = replace(finding, evidence=finding.evidence * 100, provenance=finding.provenance * 300, cause=EVIL * 100)
    trial = report.trials[0]
    assert trial.run is not None
    trial = replace(trial, run=replace(trial.run, loss=(1.0,) * 1000, grad_norm=(2.0,) * 1000))
    return replace(
        report,
        findings=(finding,) * 40,
        trials=(trial,) * 60,
        strip=report.strip * 300,
        coverage=report.coverage * 300,
        environment={f"{EVIL}{i}": EVIL * 20 for i in range(500)},
        scenario={f"a{i}": EVIL * 20 for i in range(300)},
        bisection={"culprits": [EVIL] * 100, "corrections": [], "probes": 3, "one_minimal": False,
                   "verdicts": [{"mode": EVIL, "outcome": "fail"}] * 500},
        command=EVIL * 300,
    )  # fmt: skip


@pytest.mark.slow
def test_the_longest_report_fits_into_a_comment() -> None:
    """GitHub refuses 65,536 characters; what does not fit is left out in whole rows, with a note."""
    text = render_markdown(run_document(endless(hostile())))
    assert size(text) <= LIMIT
    assert text.count("<details>") == text.count("</details>")
    assert text.count("\n```") % 2 == 0
    assert "more rows left out" in text
    tags, _ = markup(text)
    assert tags <= ALLOWED_HTML
    for section in (
        "### Baseline and fixes",
        "### Activation magnitudes",
        "### Can this be trusted?",
        "### Reproduce",
        "Environment",
    ):
        assert section in text


@pytest.mark.slow
def test_a_thousand_scenarios_fit_into_a_comment() -> None:
    """GitHub refuses more than 65,535 bytes."""
    text = summary([overflow()] * 1000)
    assert size(text) <= LIMIT
    assert "more parts left out" in text


@given(st.text(max_size=60))
def test_any_text_stays_one_cell_and_brings_no_markup(text: str) -> None:
    """Prose and code are safe in a table for whatever they are given."""
    page = table(["a", "b"], [[prose(text), code(text)]], 10_000)
    tags, rows = markup(page)
    assert rows == [2, 2]
    assert tags <= {"<code>", "</code>"}


def test_a_message_mentions_nobody_on_github_and_begins_no_formula() -> None:
    """An at sign or a dollar in an error message pings nobody and starts no mathematics."""
    assert prose("ask @octocat for $5$") == "ask @&#8203;octocat for \\$5\\$"
    assert prose("weights of down_proj and __init__") == "weights of down_proj and \\_\\_init\\_\\_"
    assert prose("-0.5 and 1.5") == "-0.5 and 1.5"
    assert code("model.layers.0") == "`model.layers.0`"
    assert code("") == ""


def test_a_block_is_cut_between_lines() -> None:
    """A long block keeps its fence and says how many lines are missing."""
    block = fenced("\n".join(f"line {i}" for i in range(1000)), "yaml", 500)
    assert size(block) <= 500
    assert block.startswith("```yaml\nline 0\n")
    assert "more lines left out" in block
    assert block.count("```") == 2


def test_what_was_made_again_is_among_what_can_be_trusted() -> None:
    """Not among what was not covered, in which report.json keeps it."""
    gap, replayed = (
        "a forked process: not watched.",
        f"{REPLAYED}1 failed call replayed; the results are bitwise equal.",
    )
    told = render_markdown(run_document(replace(overflow(), coverage=(gap, replayed))))
    covered, _, gaps = told.partition("### Can this be trusted?")[2].partition("**Not covered**")
    assert "1 failed call replayed" in covered
    assert gap in gaps
    assert "1 failed call replayed" not in gaps
