"""The report for a ticket: GitHub-flavoured Markdown that always fits into one comment."""

from collections.abc import Callable

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.report.comparison import compare, outcome_words, runs
from dtypedoctor.report.facts import (
    CONFIDENCE,
    STATUS,
    bisection_summary,
    bisection_verdicts,
    cures,
    environment_rows,
    link_dtypes,
    no_cure,
    observer_sentence,
    place,
)
from dtypedoctor.report.markdown_text import bullets, code, details, fenced, prose, size, table
from dtypedoctor.report.model import Report
from dtypedoctor.report.numbers import series
from dtypedoctor.report.reproduction import reproduction_script, scenario_yaml
from dtypedoctor.report.strip import scale_caption, strip_lines

__all__ = ["LIMIT", "comparison_table", "render_markdown"]

LIMIT = 65_535
"""The longest text that GitHub takes as an issue or a comment."""

_FINDINGS_IN_FULL, _REST = 3, 4000
"""Findings that are told in full, and the bytes for a table of the others."""
_WIDEST, _MOST_RUNS = 6, 12
"""Runs side by side in one table, and in all."""


def render_markdown(report: Report) -> str:
    """The report as Markdown of at most :data:`LIMIT` bytes.

    Every section has room of its own, so that an endless one never pushes out another; what does not fit is left out
    in whole rows, items or lines, with a note.
    """
    page = ""
    for section, room in _SECTIONS.items():
        text = section(report, room)
        if text and size(page) + size(text) > LIMIT - 1000:
            text = "*A section is left out to stay within GitHub's limit; report.json has it.*"
        page += f"{text}\n\n" if text else ""
    return page.rstrip("\n") + "\n"


def comparison_table(report: Report, room: int) -> str:
    """The before/after table as Markdown in at most ``room`` bytes; empty where nothing ran."""
    comparison = compare(report)
    columns = comparison.columns[:_MOST_RUNS]
    parts = [columns[i : i + _WIDEST] for i in range(0, len(columns), _WIDEST)]
    tables = []
    for part in parts:
        rows = [[label, *(prose(column.cells[i], 200) for column in part)] for i, label in enumerate(comparison.rows)]
        tables.append(table(["", *(prose(column.label, 60) for column in part)], rows, room // len(parts)))
    if len(columns) < len(comparison.columns):
        tables.append(f"*{len(comparison.columns) - len(columns)} more runs left out; report.json has them.*")
    return "\n\n".join(tables)


def _headline(report: Report, room: int) -> str:
    lines = [
        f"## {STATUS[report.status]}: {prose(report.headline, 600)}",
        f"Scenario {code(report.name)}, diagnosed by dtypedoctor.",
    ]
    if report.findings:
        lines.append(_summary(report, room - size("".join(lines))))
    return "\n\n".join(lines)


def _summary(report: Report, room: int) -> str:
    finding = report.findings[0]
    rows = [["**what**", f"{code(finding.id)} ({finding.severity}, {CONFIDENCE[finding.confidence]})"]]
    rows += [[f"**{label}**", code(value)] for label, value in place(finding)]
    rows.append(["**cured by**", ", ".join(code(cure, 100) for cure in cures(report)[:10]) or no_cure(report)])
    return table(["", ""], rows, room)


def _findings(report: Report, room: int) -> str:
    parts = []
    shown, rest = report.findings[:_FINDINGS_IN_FULL], report.findings[_FINDINGS_IN_FULL:]
    share = (room - _REST if rest else room) // max(len(shown), 1)
    for position, finding in enumerate(shown, start=1):
        title = f"### {position}. {prose(finding.summary, 400)}"
        body = _finding(finding, share - size(title) - 400, first=position == 1)
        parts.append(f"{title}\n\n{body}")
    if rest:
        rows = [[code(f.id), str(f.severity), code(f.fqn or "", 120), prose(f.summary, 300)] for f in rest]
        body = table(["id", "severity", "module", "summary"], rows, _REST)
        parts.append(details(f"{len(rest)} more findings, less important or consequences", body))
    return "\n\n".join(parts)


def _finding(finding: Finding, room: int, *, first: bool) -> str:
    parts = []
    if not first:
        facts = ", ".join(f"{label} {code(value)}" for label, value in place(finding))
        parts.append(f"{code(finding.id)} ({finding.severity}, {CONFIDENCE[finding.confidence]}). {facts}")
    parts.append(f"**Cause.** {prose(finding.cause, 1200)}")
    if finding.evidence:
        parts.append("**Evidence.**\n\n" + bullets([prose(item, 600) for item in finding.evidence], room // 3))
    if finding.provenance:
        rows = [
            [code(link.fqn or "–"), code(link.op), prose(link_dtypes(link)), code(link.source or "–")]
            for link in finding.provenance
        ]
        chain = table(["module", "op", "dtype", "source"], rows, room // 3)
        parts.append(f"**Where the dtype came from** (from the failing op back to its origin).\n\n{chain}")
    if finding.remedies:
        parts.append("**Remedies, best first.** " + ", ".join(code(remedy, 100) for remedy in finding.remedies[:10]))
    if finding.references:
        parts.append(
            "**The same failure elsewhere.**\n\n" + bullets([prose(url, 300) for url in finding.references], room // 8)
        )
    return "\n\n".join(parts)


def _comparison(report: Report, room: int) -> str:
    shown = comparison_table(report, room - 3000)
    if not shown:
        return ""
    comparison = compare(report)
    parts = [f"### {'Before and after' if len(comparison.columns) > 1 else 'The run'}", shown]
    parts += [prose(note) for note in comparison.notes]
    verdicts = [
        f"{code(trial.remedy)}: **{outcome_words(trial.outcome)}**. {prose(trial.reason, 400)}"
        for trial in report.trials
    ]
    if verdicts:
        parts.append(bullets(verdicts, 2800))
    return "\n\n".join(parts)


def _per_step(report: Report, room: int) -> str:
    compared = [run for run in runs(report) if len(run.loss) > 1 or len(run.grad_norm) > 1 or len(run.reward) > 1]
    rows = [
        [quantity, prose(run.label, 100), prose(series(values, 60))]
        for quantity, pick in (("loss", 0), ("grad_norm", 1), ("reward", 2))
        for run in compared
        if len(values := (run.loss, run.grad_norm, run.reward)[pick]) > 0
    ]
    return details("Loss, grad_norm and reward per step", table(["", "run", "per step"], rows, room)) if rows else ""


def _strip(report: Report, room: int) -> str:
    lines = strip_lines(report.strip)
    if not lines:
        return ""
    rows = [
        [
            "**▶**" if line.is_origin else "",
            code(line.name, 100),
            prose(line.dtype),
            line.absmax,
            f"`{line.bar(16)}`" if line.fill is not None else "",
            f"**{line.note}**" if line.is_origin else line.note,
        ]
        for line in lines
    ]
    shown = table(["", "module", "dtype", "absmax", "of its range", ""], rows, room)
    return f"### Magnitudes around the origin, in execution order\n\n{shown}\n\n{prose(scale_caption(report.strip))}"


def _bisection(report: Report, room: int) -> str:
    if report.bisection is None:
        return ""
    facts = bullets([f"{label}: {code(value, 500)}" for label, value in bisection_summary(report.bisection)], room // 3)
    rows = [[prose(cell, 200) for cell in verdict] for verdict in bisection_verdicts(report.bisection)]
    verdicts = table(["mode", "outcome", "phase", "module", "absmax"], rows, room // 2)
    return f"### Bisection\n\n{facts}\n\n{verdicts}" if rows else f"### Bisection\n\n{facts}"


def _trust(report: Report, room: int) -> str:
    parts = ["### Can this be trusted?", prose(observer_sentence(report.observer), 600)]
    if report.expectation:
        met = {True: "met", False: "**not met**", None: "not judged"}[report.expectation_met]
        parts.append(f"Expectation {met}: {prose(report.expectation, 600)}")
    if report.coverage:
        parts.append("Not watched:\n\n" + bullets([prose(item, 300) for item in report.coverage], room // 2))
    return "\n\n".join(parts)


def _reproduce(report: Report, room: int) -> str:
    parts = ["### Reproduce"]
    if report.command:
        parts.append(fenced(report.command, "sh", 2500))
    scenario, script = scenario_yaml(report), reproduction_script(report)
    if scenario:
        parts.append(details("Scenario", fenced(scenario, "yaml", (room - 3000) // 2)))
        parts.append(details("Script that runs it on another machine", fenced(script, "sh", (room - 3000) // 2)))
    return "\n\n".join(parts) if len(parts) > 1 else ""


def _environment(report: Report, room: int) -> str:
    rows = [[code(name), code(value)] for name, value in environment_rows(report.environment)]
    return details("Environment", table(["", ""], rows, room)) if rows else ""


_SECTIONS: dict[Callable[[Report, int], str], int] = {
    _headline: 7_000,
    _findings: 17_000,
    _comparison: 9_000,
    _per_step: 5_000,
    _strip: 4_000,
    _bisection: 4_000,
    _trust: 4_000,
    _reproduce: 10_000,
    _environment: 5_000,
}
"""The sections in order, each with the bytes that it may take; together less than :data:`LIMIT`."""
