"""The report for a person at the prompt: 80 columns and up, and nothing that only colour says."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.report.comparison import Column, compare, outcome_words, runs
from dtypedoctor.report.facts import (
    CONFIDENCE,
    STATUS,
    bisection_summary,
    bisection_verdicts,
    environment_rows,
    link_dtypes,
    observer_sentence,
    place,
)
from dtypedoctor.report.model import Report, Status
from dtypedoctor.report.numbers import series
from dtypedoctor.report.strip import StripLine, scale_caption, strip_lines
from dtypedoctor.report.terminal_page import Page
from dtypedoctor.report.text import fold, one_line

__all__ = ["render_terminal"]

_SEVERITY_STYLE = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold blue"}
_OUTCOME_STYLE = {"fixed": "bold green", "not fixed": "bold red", "not tried": "yellow"}
_LABELS, _NARROWEST = 19, 15
"""Columns of the row labels, and the fewest that a run takes in the before/after table."""

_BAR = 14


def render_terminal(report: Report, console: Console) -> None:
    """Prints ``report`` on ``console``, as wide as the console is, without colour where the console has none."""
    page = Page(console)
    _headline(page, report)
    _strip(page, report)
    for position, finding in enumerate(report.findings, start=1):
        _finding(page, finding, f" {position} of {len(report.findings)}" if len(report.findings) > 1 else "")
    _trials(page, report)
    _per_step(page, report)
    _bisection(page, report)
    _certificates(page, report)
    if report.next_command:
        page.heading("Next")
        page.line(report.next_command, style="bold", indent=2)


def _headline(page: Page, report: Report) -> None:
    style = "bold green" if report.status is Status.HEALTHY else "bold red"
    page.line(f"{STATUS[report.status]}: {one_line(report.headline, 600)}", style=style)
    page.line(f"scenario {one_line(report.name)}", style="dim")


def _strip(page: Page, report: Report) -> None:
    lines = strip_lines(report.strip)
    if not lines:
        return
    page.heading("Magnitudes around the origin, in execution order")
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


def _finding(page: Page, finding: Finding, number: str) -> None:
    page.heading(f"Finding{number}")
    head = f"{finding.severity.upper()} {one_line(finding.id)}  ({CONFIDENCE[finding.confidence]})"
    page.line(head, style=_SEVERITY_STYLE[finding.severity], indent=2)
    page.line(finding.summary, indent=2)
    facts = [*place(finding), ("cause", finding.cause)]
    page.table([page.text(label, "dim"), page.text(value)] for label, value in facts)
    page.bullets("evidence", finding.evidence)
    chain = [
        f"{one_line(link.fqn or '(no module)')}: {one_line(link.op)}, {link_dtypes(link)}"
        + (f", {one_line(link.source)}" if link.source else "")
        for link in finding.provenance
    ]
    page.bullets("where the dtype came from", chain)
    page.bullets("remedies, best first", finding.remedies)
    page.bullets("the same failure elsewhere", finding.references)


def _trials(page: Page, report: Report) -> None:
    comparison = compare(report)
    if comparison.columns:
        page.heading("Before and after" if len(comparison.columns) > 1 else "The run")
        fit = max(1, (page.width - _LABELS) // _NARROWEST)
        for start in range(0, len(comparison.columns), fit):
            _comparison(page, comparison.rows, comparison.columns[start : start + fit])
        for note in comparison.notes:
            page.line(note, style="dim", indent=2)
    for trial in report.trials:
        words = outcome_words(trial.outcome)
        page.line(f"{one_line(trial.remedy)}: {words}. {trial.reason}", style=_OUTCOME_STYLE[words], indent=2)


def _comparison(page: Page, rows: Sequence[str], columns: Sequence[Column]) -> None:
    width = (page.width - _LABELS) // len(columns) - 2

    def cell(text: str) -> Text:
        # Rich breaks lines at spaces only; ids such as float16-overflow are better broken at their hyphens.
        return page.text(fold(one_line(text), width), _OUTCOME_STYLE.get(text, ""))

    body = [[page.text(""), *(cell(column.label) for column in columns)]]
    body += [[page.text(rows[i], "dim"), *(cell(column.cells[i]) for column in columns)] for i in range(len(rows))]
    page.table(body)


def _per_step(page: Page, report: Report) -> None:
    compared = runs(report)
    for title, values in (
        ("loss", [run.loss for run in compared]),
        ("grad_norm", [run.grad_norm for run in compared]),
        ("reward", [run.reward for run in compared]),
    ):
        if any(len(value) > 1 for value in values):
            page.heading(f"{title} per step")
            page.table(
                [page.text(one_line(run.label, 40), "dim"), page.text(series(value))]
                for run, value in zip(compared, values, strict=True)
            )


def _bisection(page: Page, report: Report) -> None:
    if report.bisection is None:
        return
    page.heading("Bisection")
    page.table([page.text(label, "dim"), page.text(value)] for label, value in bisection_summary(report.bisection))
    verdicts = [[page.text(one_line(cell)) for cell in verdict] for verdict in bisection_verdicts(report.bisection)]
    page.table(verdicts, ["mode", "outcome", "phase", "module", "absmax"])


def _certificates(page: Page, report: Report) -> None:
    if report.expectation:
        page.heading("Expectation")
        met = {True: "met", False: "NOT met", None: "not judged"}[report.expectation_met]
        page.line(f"{met}: {report.expectation}", indent=2)
    page.heading("Can this be trusted?")
    page.line(observer_sentence(report.observer), indent=2)
    page.bullets("not watched", report.coverage)
    environment = [f"{name.rpartition('.')[2]} {value}" for name, value in environment_rows(report.environment)]
    if environment:
        page.heading("Environment")
        page.line(", ".join(environment), style="dim", indent=2)
