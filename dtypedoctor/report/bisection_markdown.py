"""A bisection in a ticket."""

from dtypedoctor.report.bisection_facts import (
    VERDICT_HEADER,
    VERDICT_NOTE,
    bisection_summary,
    bisection_verdicts,
    remedy_yaml,
)
from dtypedoctor.report.markdown_text import bullets, code, fenced, prose, table
from dtypedoctor.report.model import Report

__all__ = ["bisection_part"]


def bisection_part(report: Report, room: int) -> str:
    """The section about the bisection in at most ``room`` bytes; empty where there is none."""
    if report.bisection is None:
        return ""
    facts = [f"{label}: {code(value, 500)}" for label, value in bisection_summary(report.bisection)]
    parts = ["### Bisection", bullets(facts, room // 4)]
    rows = [[prose(cell, 200) for cell in verdict] for verdict in bisection_verdicts(report.bisection)]
    if rows:
        parts += [table(VERDICT_HEADER, rows, room // 2), VERDICT_NOTE]
    remedy = remedy_yaml(report.bisection)
    if remedy:
        parts += ["To put into the scenario:", fenced(remedy, "yaml", room // 6)]
    return "\n\n".join(parts)
