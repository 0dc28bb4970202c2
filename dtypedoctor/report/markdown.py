"""The report for a ticket: GitHub-flavoured Markdown that always fits into one comment."""

from collections.abc import Callable, Sequence

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.report.bisection_markdown import bisection_part
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
from dtypedoctor.report.markdown_text import bullets, code, details, fenced, prose, size, table
from dtypedoctor.report.model import Report
from dtypedoctor.report.numbers import ABSENT, series
from dtypedoctor.report.remedy_lines import legend, remedy_lines, which_one
from dtypedoctor.report.reproduction import ELSEWHERE, reproduction_script
from dtypedoctor.report.strip import scale_caption, strip_lines, strip_title
from dtypedoctor.report.what_ran import what_ran

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
    """The before/after table as Markdown in at most ``room`` bytes, the remedies that do not cure folded away below it.

    Empty where nothing ran.
    """
    comparison = compare(report)
    shown = _columns(comparison.rows, comparison.main, room // 2)
    if comparison.failed:
        shown += "\n\n" + details(
            comparison.failed_title, _columns(comparison.rows, comparison.failed, room // 2 - 100)
        )
    return shown


def _columns(labels: Sequence[str], columns: Sequence[Column], room: int) -> str:
    """Runs side by side, in as many tables as it takes; rows in which none of them has anything to say are left out."""
    kept = columns[:_MOST_RUNS]
    parts = [kept[i : i + _WIDEST] for i in range(0, len(kept), _WIDEST)]
    tables = []
    for part in parts:
        said = [i for i in range(len(labels)) if any(column.cells[i] != ABSENT for column in part)]
        rows = [[labels[i], *(prose(column.cells[i], 200) for column in part)] for i in said]
        tables.append(table(["", *(prose(column.label, 60) for column in part)], rows, room // len(parts)))
    if len(kept) < len(columns):
        tables.append(f"*{len(columns) - len(kept)} more runs left out; report.json has them.*")
    return "\n\n".join(tables)


def _headline(report: Report, room: int) -> str:
    lines = [
        f"## {status_word(report)}: {prose(report.headline, 600)}",
        f"Scenario {code(report.name)}{_about(report)}, diagnosed by dtypedoctor.",
    ]
    if report.findings:
        lines.append(_summary(report, room - size("".join(lines))))
    return "\n\n".join(lines)


def _about(report: Report) -> str:
    """What the scenario does."""
    ran = what_ran(report)
    return f" ({prose(ran, 300)})" if ran else ""


def _summary(report: Report, room: int) -> str:
    rows = [
        [f"**{fact.label}**", code(fact.code, 400) + fact.joint + prose(fact.text, 400)]
        for fact in first_screen(report)
    ]
    meaning = proven_means(report)
    return table(["", ""], rows, room - 200) + (f"\n\n{meaning}" if meaning else "")


def _findings(report: Report, room: int) -> str:
    if not report.findings:
        return ""
    first, *others = report.findings[:_FINDINGS_IN_FULL]
    rest = report.findings[_FINDINGS_IN_FULL:]
    share = (room - _REST if rest else room) // (1 + len(others)) - 900  # for the heading, and the facts below it
    parts = ["### Why", _story(first, share)]
    for position, finding in enumerate(others, start=2):
        facts = ", ".join(f"{label} {code(value)}" for label, value in place(finding))
        parts += [
            f"### Finding {position}. {prose(title(finding), 400)}",
            f"{code(finding.id)} ({finding.severity}, {CONFIDENCE[finding.confidence]}). {facts}",
            _story(finding, share),
        ]
    if rest:
        rows = [[code(f.id), str(f.severity), code(f.fqn or "", 120), prose(f.summary, 300)] for f in rest]
        body = table(["id", "severity", "module", "summary"], rows, _REST)
        parts.append(details(f"{len(rest)} more findings, less important or consequences", body))
    return "\n\n".join(parts)


def _story(finding: Finding, room: int) -> str:
    """Cause, evidence, where the dtypes came from, and where else it was seen."""
    parts = [f"**Cause.** {prose(finding.cause, 1200)}"]
    if finding.evidence:
        parts.append("**Evidence.**\n\n" + bullets([prose(item, 600) for item in finding.evidence], room // 3))
    for about, links in chains(finding):
        rows = [
            [prose(link_dtypes(link)), code(link.op), code(link.fqn or "–"), code(link.source or "–")] for link in links
        ]
        parts.append(f"**{about.capitalize()}.**\n\n" + table(["dtype", "op", "module", "source"], rows, room // 5))
    if finding.references:
        parts.append(
            "**The same failure elsewhere.**\n\n" + bullets([prose(url, 300) for url in finding.references], room // 8)
        )
    return "\n\n".join(parts)


def _remedies(report: Report, room: int) -> str:
    lines = remedy_lines(report)
    if not lines:
        return ""
    rows = [
        [
            code(line.id, 100),
            prose(line.change, 300),
            f"**{line.outcome}**" + (f": {prose(line.reason, 400)}" if line.reason else ""),
        ]
        for line in lines
    ]
    parts = ["### Remedies", table(["remedy", "what it changes", "outcome"], rows, room - 2000), legend(lines)]
    choice = [f"{code(remedy, 100)} if {prose(when, 300)}" for remedy, when in which_one(report)]
    if choice:
        parts.append("**Which one.** Prefer\n\n" + bullets(choice, 1600))
    return "\n\n".join(filter(None, parts))


def _comparison(report: Report, room: int) -> str:
    shown = comparison_table(report, room - 1500)
    if not shown:
        return ""
    comparison = compare(report)
    parts = [f"### {'Before and after' if len(comparison.columns) > 1 else 'The run'}", shown]
    if comparison.notes:
        parts.append(bullets([prose(note) for note in comparison.notes], 1400))
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
    return f"### {strip_title(report.strip)}, in execution order\n\n{shown}\n\n{prose(scale_caption(report.strip))}"


def _trust(report: Report, room: int) -> str:
    parts = ["### Can this be trusted?", prose(observer_sentence(report.observer), 600)]
    if measured_sentence(report):
        parts.append(prose(measured_sentence(report), 600))
    if raw_sentence(report):
        parts.append(prose(raw_sentence(report), 600))
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
    script = reproduction_script(report)
    if script:
        parts.append(details(ELSEWHERE, fenced(script, "sh", room - 3000)))
    return "\n\n".join(parts) if len(parts) > 1 else ""


def _environment(report: Report, room: int) -> str:
    rows = [[code(name), code(value)] for name, value in environment_rows(report.environment)]
    return details("Environment", table(["", ""], rows, room)) if rows else ""


_SECTIONS: dict[Callable[[Report, int], str], int] = {
    _headline: 7_000,
    _findings: 15_000,
    _remedies: 5_000,
    _comparison: 8_000,
    _per_step: 5_000,
    _strip: 4_000,
    bisection_part: 4_000,
    _trust: 4_000,
    _reproduce: 10_000,
    _environment: 5_000,
}
"""The sections in order, each with the bytes that it may take; together less than :data:`LIMIT`."""
