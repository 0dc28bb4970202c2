"""A short page for the job summary of GitHub Actions."""

from collections.abc import Sequence

from dtypedoctor.report.facts import CONFIDENCE, ended_with, status_word
from dtypedoctor.report.markdown import comparison_table
from dtypedoctor.report.markdown_text import code, details, prose, size, table
from dtypedoctor.report.model import Report, Status
from dtypedoctor.report.remedy_lines import cures

__all__ = ["merge_github_summary", "render_github_summary"]

LIMIT = 1_000_000
"""GitHub refuses a step's summary above 1 MiB."""

_ROOM = 12_000


def render_github_summary(report: Report) -> str:
    """The report as a job summary: verdict, findings, what cures, the before/after table folded away."""
    return merge_github_summary([report])


def merge_github_summary(reports: Sequence[Report]) -> str:
    """Several reports as one job summary: a table of all scenarios, then each that needs attention, then the others."""
    ordered = sorted(reports, key=_passed)
    rows = [
        [_mark(r), code(r.name, 80), prose(_found(r), 200), prose(", ".join(line.id for line in cures(r)) or "–", 200)]
        for r in ordered
    ]
    page = "## dtypedoctor\n\n" + table(["", "scenario", "found", "cured by"], rows, LIMIT // 3)
    left_out = 0
    for report in ordered:
        section = _section(report)
        if size(page) + size(section) > LIMIT - 200:
            left_out += 1
        else:
            page += f"\n\n{section}"
    return page + (f"\n\n*{left_out} more scenarios left out; their report.json has them.*\n" if left_out else "\n")


def _passed(report: Report) -> bool:
    return report.expectation_met if report.expectation_met is not None else report.status is Status.HEALTHY


def _mark(report: Report) -> str:
    return "✅ pass" if _passed(report) else "❌ **fail**"


def _found(report: Report) -> str:
    return ", ".join(finding.id for finding in report.findings[:4]) or status_word(report).lower()


def _section(report: Report) -> str:
    parts = [f"### {status_word(report)}: {prose(report.headline, 400)}"]
    if ended_with(report):
        parts.append(f"Error: {code(ended_with(report), 400)}")
    if report.findings:
        rows = [
            [code(f.id), f"{f.severity}, {CONFIDENCE[f.confidence]}", code(f.fqn or "–", 120), code(f.source or "–")]
            for f in report.findings
        ]
        parts.append(table(["finding", "how sure", "module", "source"], rows, _ROOM // 2))
    shown = comparison_table(report, _ROOM // 2)
    if shown:
        parts.append(details("Before and after", shown))
    return "\n\n".join(parts)
