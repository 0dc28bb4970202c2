"""The parts of the HTML page about the runs: remedies, and before and after."""

from collections.abc import Sequence

from dtypedoctor.report.charts import line_chart
from dtypedoctor.report.comparison import Column, compare, runs
from dtypedoctor.report.elements import Html, el, join, table
from dtypedoctor.report.model import Report
from dtypedoctor.report.numbers import ABSENT
from dtypedoctor.report.remedy_lines import RemedyLine, legend, remedy_lines, which_one
from dtypedoctor.report.text import one_line

__all__ = ["comparison", "remedies"]


def remedies(report: Report) -> Html:
    """All remedies, those that cure first, each with what it changes and what came of it."""
    lines = remedy_lines(report)
    if not lines:
        return Html()
    rows = [
        [
            el("code", one_line(line.id)),
            line.change,
            join((_outcome(line), f": {one_line(line.reason, 600)}" if line.reason else "")),
        ]
        for line in lines
    ]
    shown = table(["remedy", "what it changes", "outcome"], rows, "Those that cure first")
    note = el("p", legend(lines), class_="dim") if legend(lines) else Html()
    return el("section", el("h2", "Remedies"), shown, note, _which_one(report), id="remedies", class_="card")


def _outcome(line: RemedyLine) -> Html:
    return el("strong", line.outcome, class_="good" if line.cures else None)


def _which_one(report: Report) -> Html:
    choice = which_one(report)
    if not choice:
        return Html()
    items = (el("li", el("code", one_line(remedy)), f" if {when}") for remedy, when in choice)
    return join((el("h3", "Which one: prefer"), el("ul", *items)))


def comparison(report: Report) -> Html:
    """The before/after table, the remedies that do not cure folded away, and loss, grad_norm and reward over the steps."""
    found = compare(report)
    if not found.columns:
        return Html()
    notes = el("ul", *(el("li", note) for note in found.notes), class_="dim notes") if found.notes else Html()
    title = "Before and after" if len(found.columns) > 1 else "The run"
    shown = _side_by_side(found.rows, found.main, "One column per run")
    parts = [el("h2", title), el("div", shown, _charts(report, len(found.main)), class_="beside"), notes]
    if found.failed:
        parts.append(
            el(
                "details",
                el("summary", found.failed_title),
                _side_by_side(found.rows, found.failed, "One column per run"),
            )
        )
    return el("section", *parts, id="compare", class_="card")


def _side_by_side(labels: Sequence[str], columns: Sequence[Column], caption: str) -> Html:
    said = [i for i in range(len(labels)) if any(column.cells[i] != ABSENT for column in columns)]
    rows = [[labels[i], *(one_line(column.cells[i]) for column in columns)] for i in said]
    return table(["", *(one_line(column.label) for column in columns)], rows, caption)


def _charts(report: Report, shown: int) -> Html:
    """One chart a quantity, of the first ``shown`` runs: more lines than those that matter cannot be told apart."""
    compared = [(one_line(run.label, 60), run) for run in runs(report)[:shown]]
    return el(
        "div",
        line_chart("loss", [(label, run.loss) for label, run in compared]),
        line_chart("grad_norm", [(label, run.grad_norm) for label, run in compared]),
        line_chart("reward", [(label, run.reward) for label, run in compared]),
        class_="charts",
    )
