"""The report for a person at the prompt: 80 columns and up, and nothing that only colour says."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from dtypedoctor.diagnosis.finding import Finding, Link, Severity
from dtypedoctor.report.bisection_terminal import bisection_part
from dtypedoctor.report.comparison import Column, compare, runs
from dtypedoctor.report.facts import (
    CONFIDENCE,
    chains,
    environment_rows,
    link_dtypes,
    measured_sentence,
    observer_sentence,
    place,
    proven_means,
    raw_sentence,
    status_word,
    title,
)
from dtypedoctor.report.first_screen import first_screen
from dtypedoctor.report.model import Report, Status
from dtypedoctor.report.numbers import ABSENT, series
from dtypedoctor.report.remedy_lines import RemedyLine, legend, remedy_lines, which_one
from dtypedoctor.report.strip import StripLine, scale_caption, strip_lines, strip_title
from dtypedoctor.report.terminal_page import Page
from dtypedoctor.report.text import fold, one_line
from dtypedoctor.report.what_ran import what_ran

__all__ = ["render_terminal"]

_SEVERITY_STYLE = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold blue"}
_OUTCOME_STYLE = {
    "fixed": "bold green",
    "not fixed": "bold red",
    "not tried": "yellow",
    "never reached": "yellow",
    "raises, as intended": "green",
    "passes": "green",
    "passes, as without": "yellow",
    "fails as before": "yellow",
    "fails elsewhere": "yellow",
}
_LABELS, _NARROWEST = 19, 15
"""Columns of the row labels, and the fewest that a run takes in the before/after table."""

_BAR = 14


def render_terminal(report: Report, console: Console) -> None:
    """Prints ``report`` on ``console``, as wide as the console is, without colour where the console has none."""
    page = Page(console)
    _headline(page, report)
    for finding in report.findings[:1]:
        page.heading("Why")
        _story(page, finding)
    for position, finding in enumerate(report.findings[1:], start=2):
        page.heading(f"Finding {position} of {len(report.findings)}")
        _finding(page, finding)
    _strip(page, report)
    _remedies(page, remedy_lines(report))
    page.bullets("which one: prefer", [f"{remedy} if {when}" for remedy, when in which_one(report)])
    _comparison(page, report)
    _per_step(page, report)
    bisection_part(page, report)
    _certificates(page, report)
    if report.next_command:
        page.heading("Next")
        page.command(report.next_command)


def _headline(page: Page, report: Report) -> None:
    """The first screen: the verdict, what ran, and a reader's first questions."""
    style = "bold green" if report.status is Status.HEALTHY else "bold red"
    page.line(f"{status_word(report)}: {one_line(report.headline, 600)}", style=style)
    ran = what_ran(report)
    page.line(f"scenario {one_line(report.name)}" + (f": {ran}" if ran else ""), style="dim")
    facts = first_screen(report)
    if facts:
        page.gap()
        page.table([page.text(fact.label, "dim"), page.text(fact.code + fact.joint + fact.text)] for fact in facts)
    meaning = proven_means(report)
    if meaning:
        page.line(meaning, style="dim", indent=2)


def _strip(page: Page, report: Report) -> None:
    lines = strip_lines(report.strip)
    if not lines:
        return
    page.heading(f"{strip_title(report.strip)}, in execution order")
    names = max(20, page.width - 54)
    rows = [_strip_row(page, line, names) for line in lines]
    page.table(rows, ["", "module", "dtype", "absmax", "of its range", ""])
    page.line(scale_caption(report.strip), "dim", indent=2)


def _strip_row(page: Page, line: StripLine, names: int) -> list[Text]:
    style = "bold red" if line.is_origin else ""
    bar = f"|{line.bar(_BAR)}|" if line.fill is not None else ""
    cells = [
        ">" if line.is_origin else "",
        one_line(line.name, names),
        one_line(line.dtype, 8),
        line.absmax,
        bar,
        line.note,
    ]
    return [page.text(cell, style) for cell in cells]


def _finding(page: Page, finding: Finding) -> None:
    head = f"{finding.severity.upper()} {one_line(finding.id)}  ({CONFIDENCE[finding.confidence]})"
    page.line(head, style=_SEVERITY_STYLE[finding.severity], indent=2)
    page.line(title(finding), indent=2)
    page.table([page.text(label, "dim"), page.text(value)] for label, value in place(finding))
    _story(page, finding)


def _story(page: Page, finding: Finding) -> None:
    page.line("cause", style="dim", indent=2)
    page.line(finding.cause, indent=4)
    page.bullets("evidence", finding.evidence)
    for about, links in chains(finding):
        page.bullets(about, [_link(link) for link in links])
    page.bullets("the same failure elsewhere", finding.references)


def _link(link: Link) -> str:
    source = f", {one_line(link.source)}" if link.source else ""
    return f"{link_dtypes(link)}: {one_line(link.op)} in {one_line(link.fqn or '(no module)')}{source}"


def _remedies(page: Page, lines: Sequence[RemedyLine]) -> None:
    if lines:
        page.heading("Remedies, those that cure first")
    for line in lines:
        reason = f" – {line.reason}" if line.reason else ""
        page.line(f"{one_line(line.id)}: {line.outcome}{reason}", style=_OUTCOME_STYLE.get(line.outcome, ""), indent=2)
        if line.change:
            page.line(line.change, style="dim", indent=4)
    if legend(lines):
        page.line(legend(lines), style="dim", indent=2)


def _comparison(page: Page, report: Report) -> None:
    comparison = compare(report)
    if not comparison.columns:
        return
    page.heading("Before and after" if len(comparison.columns) > 1 else "The run")
    fit = max(1, (page.width - _LABELS) // _NARROWEST)
    for above, columns in (("", comparison.main), (comparison.failed_title, comparison.failed)):
        if above and columns:
            page.line(above, style="dim", indent=2)
        for start in range(0, len(columns), fit):
            _side_by_side(page, comparison.rows, columns[start : start + fit])
    for note in comparison.notes:
        page.line(note, style="dim", indent=2)


def _side_by_side(page: Page, labels: Sequence[str], columns: Sequence[Column]) -> None:
    """A table of runs; rows in which none of them has anything to say are left out."""
    width = (page.width - _LABELS) // len(columns) - 2
    said = [i for i in range(len(labels)) if any(column.cells[i] != ABSENT for column in columns)]

    def cell(text: str) -> Text:
        # Rich breaks lines at spaces only; ids such as float16-overflow are better broken at their hyphens.
        return page.text(fold(one_line(text), width), _OUTCOME_STYLE.get(text, ""))

    body = [[page.text(""), *(cell(column.label) for column in columns)]]
    body += [[page.text(labels[i], "dim"), *(cell(column.cells[i]) for column in columns)] for i in said]
    page.table(body)


def _per_step(page: Page, report: Report) -> None:
    compared = runs(report)
    for quantity, told in (
        ("loss", [(run.label, run.loss) for run in compared if run.loss]),
        ("grad_norm", [(run.label, run.grad_norm) for run in compared if run.grad_norm]),
        ("reward", [(run.label, run.reward) for run in compared if run.reward]),
    ):
        if any(len(values) > 1 for _, values in told):
            page.heading(f"{quantity} per step")
            page.table([page.text(one_line(label, 40), "dim"), page.text(series(values))] for label, values in told)


def _certificates(page: Page, report: Report) -> None:
    if report.expectation:
        page.heading("Expectation")
        met = {True: "met", False: "NOT met", None: "not judged"}[report.expectation_met]
        page.line(f"{met}: {report.expectation}", indent=2)
    page.heading("Can this be trusted?")
    page.line(observer_sentence(report.observer), indent=2)
    if measured_sentence(report):
        page.line(measured_sentence(report), indent=2)
    if raw_sentence(report):
        page.line(raw_sentence(report), indent=2)
    page.bullets("not watched", report.coverage)
    environment = [f"{name.rpartition('.')[2]} {value}" for name, value in environment_rows(report.environment)]
    if environment:
        page.heading("Environment")
        page.line(", ".join(environment), style="dim", indent=2)
