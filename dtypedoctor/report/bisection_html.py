"""A bisection on the page."""

from dtypedoctor.report.bisection_facts import (
    VERDICT_HEADER,
    VERDICT_NOTE,
    bisection_summary,
    bisection_verdicts,
    remedy_yaml,
)
from dtypedoctor.report.elements import Html, el, join, table
from dtypedoctor.report.model import Report
from dtypedoctor.report.text import one_line

__all__ = ["bisection_part"]


def bisection_part(report: Report) -> Html:
    """The section about the bisection; nothing where there is none."""
    if report.bisection is None:
        return Html()
    facts = [join((el("dt", label), el("dd", one_line(v, 500)))) for label, v in bisection_summary(report.bisection)]
    parts = [el("h2", "Bisection"), el("dl", *facts, class_="facts")]
    verdicts = bisection_verdicts(report.bisection)
    if verdicts:
        parts += [table(VERDICT_HEADER, verdicts, "Verdicts, one mode a row"), el("p", VERDICT_NOTE, class_="dim")]
    remedy = remedy_yaml(report.bisection)
    if remedy:
        parts += [el("h3", "Remedy, to put into the scenario"), el("pre", el("code", remedy))]
    return el("section", *parts, id="bisection", class_="card")
