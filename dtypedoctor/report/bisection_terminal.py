"""A bisection at the prompt: the answer first, then what it rests on."""

from rich.console import Console

from dtypedoctor.report.bisection_facts import (
    VERDICT_HEADER,
    VERDICT_NOTE,
    bisection_summary,
    bisection_verdicts,
    remedy_yaml,
)
from dtypedoctor.report.facts import observer_sentence
from dtypedoctor.report.model import Report
from dtypedoctor.report.terminal_page import Page
from dtypedoctor.report.text import one_line

__all__ = ["bisection_part", "render_bisection"]

_OUTCOME_STYLE = {"pass": "green", "fail": "bold red", "unresolved": "yellow"}
_HEALTHY = "healthy"
_NAME = 26
"""Columns of a module's name; what is longer loses its beginning."""


def render_bisection(report: Report, console: Console) -> None:
    """Prints what ``dtypedoctor bisect`` has found; ``dtypedoctor report`` prints the diagnosis besides."""
    page = Page(console)
    healthy = (report.bisection or {}).get("end") == _HEALTHY
    page.line(one_line(report.headline, 1000), style="bold green" if healthy else "bold")
    page.line(f"scenario {one_line(report.name)}", style="dim")
    bisection_part(page, report)
    page.heading("Can this be trusted?")
    page.line(observer_sentence(report.observer), indent=2)
    if report.next_command:
        page.heading("Next")
        page.command(report.next_command)


def bisection_part(page: Page, report: Report) -> None:
    """The part of a report's page that is about its bisection; nothing where there is none, or nothing to bisect."""
    bisection = report.bisection
    if bisection is None or bisection.get("end") == _HEALTHY:
        return
    page.heading("Bisection")
    page.table([page.text(label, "dim"), page.text(value)] for label, value in bisection_summary(bisection))
    verdicts = bisection_verdicts(bisection)
    if verdicts:
        page.heading("Verdicts, one mode a row")
        page.table(
            (
                [
                    page.text(mode),
                    page.text(one_line(outcome), _OUTCOME_STYLE.get(outcome, "")),
                    page.text(phase),
                    page.text(_end_of(one_line(module))),
                    page.text(absmax),
                ]
                for mode, outcome, phase, module, absmax in verdicts
            ),
            VERDICT_HEADER,
        )
        page.line(VERDICT_NOTE, style="dim", indent=2)
    remedy = remedy_yaml(bisection)
    if remedy:
        page.heading("Remedy, to put into the scenario")
        page.line(remedy, indent=2)


def _end_of(name: str) -> str:
    """The last parts of a dotted name, as many as fit."""
    shown = name
    while len(shown) > _NAME and "." in shown:
        shown = shown.partition(".")[2]
    return shown if shown == name else f"…{shown}"
