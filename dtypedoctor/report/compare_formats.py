"""The formats of a comparison: the prompt, Markdown for a ticket, JSON for programs."""

import json
from collections.abc import Callable, Sequence

from rich.console import Console

from dtypedoctor.redaction.redact import redact
from dtypedoctor.report.compare_sections import Section, page_of
from dtypedoctor.report.compare_words import headline
from dtypedoctor.report.markdown_text import bullets, code, prose, size, table
from dtypedoctor.report.terminal_page import Page as Paper
from dtypedoctor.report.text import one_line
from dtypedoctor.report.to_json import plain
from dtypedoctor.trials.comparison import TraceComparison

__all__ = ["COMPARISON_RENDERERS", "SCHEMA", "render_comparison"]

SCHEMA = 1
"""Version of the JSON form; it changes by addition only."""

_ROOM = 6_000
"""Bytes that one section of the Markdown form may take: ten of them stay below GitHub's limit."""


def render_comparison(found: TraceComparison, console: Console) -> None:
    """Prints a comparison on ``console``."""
    page = page_of(found)
    paper = Paper(console)
    paper.line(one_line(page.headline, 600), style="bold green" if page.good else "bold red")
    for section in page.sections:
        paper.heading(section.title)
        paper.table([paper.text("-"), paper.text(line)] for line in section.lines)
        paper.table(
            ([paper.text(cell) for cell in _cells(section, row, paper.width)] for row in section.rows), section.header
        )
        for note in section.notes:
            paper.line(note, style="dim", indent=2)


def _cells(section: Section, row: Sequence[str], width: int) -> list[str]:
    """The cells on one line each; a name that has no room loses its beginning, whatever else is too long is folded."""
    room = max(24, width - 50)
    first = one_line(row[0])
    if section.named and len(first) > room:
        first = "…" + first[1 - room :]
    return [first, *(one_line(cell, 400) for cell in row[1:])]


def _markdown(found: TraceComparison) -> str:
    page = page_of(found)
    parts = [f"## {prose(page.headline, 600)}", "Two runs, compared by dtypedoctor."]
    parts += [_markdown_section(section) for section in page.sections]
    return "\n\n".join(parts) + "\n"


def _markdown_section(section: Section) -> str:
    parts = [f"### {section.title}"]
    if section.lines:
        parts.append(bullets([prose(line, 600) for line in section.lines], _ROOM // 3))
    if section.rows:
        first = code if section.named else prose
        rows = [[first(row[0], 120), *(prose(cell, 300) for cell in row[1:])] for row in section.rows]
        parts.append(table([prose(name) for name in section.header], rows, _ROOM - size("".join(parts)) - 500))
    parts += [prose(note) for note in section.notes]
    return "\n\n".join(parts)


def _json(found: TraceComparison) -> str:
    document = {"schema": SCHEMA, "kind": "comparison", "headline": headline(found), **plain(found)}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _redacted(render: Callable[[TraceComparison], str]) -> Callable[[TraceComparison], str]:
    return lambda found: render(redact(found))


COMPARISON_RENDERERS: dict[str, Callable[[TraceComparison], str]] = {
    "md": _redacted(_markdown),
    "json": _redacted(_json),
}
"""Each leaves out what must not stand in a public ticket."""
