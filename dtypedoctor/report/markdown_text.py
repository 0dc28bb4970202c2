"""GitHub-flavoured Markdown in which nothing that comes from elsewhere can become markup, cut to a size without breaking."""

import re
from collections.abc import Sequence

from dtypedoctor.report.text import TEXT_LIMIT, one_line, paragraphs

__all__ = ["bullets", "code", "details", "fenced", "prose", "size", "table"]

_ORDINARY = re.compile(r"[\w .:/,()=+%@#>→×…^?;!$~*&{}\[\]'\"-]+")
"""Texts that a code span shows as they are: no backtick, pipe, backslash or angle bracket that opens a tag."""
_ENTITY = re.compile(r"[^\w .,/()=+%…→×-]")
_MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|(?<!\w)@(?=\w)|&|<|>")
_LEADING = re.compile(r"^(\d*)(#|[-+=](?=[\s=-]|$)|[.)](?=\s|$))")
"""What would begin a heading, a list or a line under a heading."""


def size(text: str) -> int:
    """What ``text`` counts against GitHub's limit, taken in UTF-8 bytes so that no way of counting is above it."""
    return len(text.encode("utf-8"))


def prose(text: str, limit: int = TEXT_LIMIT) -> str:
    """``text`` on one line as running text: no markup, no mention of anybody, fit for a table cell too."""
    shown = _MARKUP.sub(_escaped, one_line(text, limit).strip())
    return _LEADING.sub(r"\1\\\2", shown)


def code(text: str, limit: int = 200) -> str:
    """``text`` on one line in a fixed-width font, fit for a table cell too; nothing at all for an empty text."""
    shown = one_line(text, limit).strip()
    if not shown or _ORDINARY.fullmatch(shown):
        return f"`{shown}`" if shown else ""
    # Inside a code span neither a backtick nor a pipe can be escaped in every place; character references can.
    return f"<code>{_ENTITY.sub(lambda match: f'&#{ord(match[0])};', shown)}</code>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> str:
    """A table of finished cells in at most ``room`` bytes, rows that do not fit left out with a note below it."""
    lines = [_row(header), _row(["---"] * len(header))]
    return _fitted(lines, [_row(row) for row in rows], room, "rows", "\n")


def bullets(items: Sequence[str], room: int) -> str:
    """A list of finished items in at most ``room`` bytes, items that do not fit left out with a note."""
    return _fitted([], [f"- {item}" for item in items], room, "items", "\n")


def fenced(text: str, language: str, room: int) -> str:
    """A code block in at most ``room`` bytes, lines that do not fit left out with a note."""
    shown = paragraphs(text, room)
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    lines = shown.split("\n")
    kept = _fitting(lines, room - 2 * size(fence) - size(language) - 80)
    block = "\n".join([fence + language, *lines[:kept], fence])
    return block if kept == len(lines) else f"{block}\n\n{_left_out(len(lines) - kept, 'lines')}"


def details(summary: str, body: str) -> str:
    """``body`` folded away under ``summary`` (finished texts)."""
    return f"<details>\n<summary>{summary}</summary>\n\n{body}\n\n</details>"


def _escaped(match: re.Match[str]) -> str:
    references = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "@&#8203;"}
    return references.get(match[0], "\\" + match[0])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _fitted(head: list[str], body: list[str], room: int, what: str, joint: str) -> str:
    kept = _fitting(body, room - size(joint.join(head)) - 80)
    lines = [*head, *body[:kept]]
    if kept < len(body):
        lines += ["", _left_out(len(body) - kept, what)]
    return joint.join(lines)


def _fitting(lines: Sequence[str], room: int) -> int:
    used = 0
    for position, line in enumerate(lines):
        used += size(line) + 1
        if used > room:
            return position
    return len(lines)


def _left_out(count: int, what: str) -> str:
    return f"*{count:,} more {what} left out to stay within GitHub's limit; report.json has them.*"
