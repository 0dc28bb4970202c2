"""Documents for a ticket: GitHub-flavored Markdown that fits into one comment, and in which no text can become markup."""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, metadata
from itertools import chain
from typing import TypeVar

from dtypedoctor.plugins import Format
from dtypedoctor.report.document import (
    Bar,
    Beside,
    Block,
    Code,
    Document,
    Facts,
    Fold,
    Heading,
    Inline,
    Items,
    Line,
    Look,
    Paragraph,
    Section,
    Table,
    Words,
    parts_of,
    shares,
)
from dtypedoctor.text import ABSENT, TEXT_LIMIT, one_line, paragraphs
from dtypedoctor.version import __version__

_Thing = TypeVar("_Thing")

LIMIT = 65_535
"""Bytes of the longest text that GitHub takes as an issue or a comment; the summary of a job may be longer."""
_NOTE = 80
"""Bytes for the note that something is left out."""
_LEAST = 200
"""Bytes below which nothing of a large part can be shown."""
_CELL, _BAR = 400, 16

_ORDINARY = re.compile(r"[\w .:/,()=+%@#>→×…^?;!$~*&{}\[\]'\"-]+")
"""Texts that a code span shows as they are: no backtick, pipe, backslash or angle bracket that opens a tag."""
_ENTITY = re.compile(r"[^\w .,/()=+%…→×-]")
_MARKUP = re.compile(r"[\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_])|(?<!\w)@(?=\w)|&|<|>")
_LEADING = re.compile(r"^(\d*)(#|[-+=](?=[\s=-]|$)|[.)](?=\s|$))")
"""What would begin a heading, a list or a line under a heading."""


def render_markdown(document: Document, limit: int = LIMIT) -> str:
    """The document as Markdown of at most ``limit`` bytes.

    Small parts are whole; large ones share the room that is left, and lose rows, items or lines with a note.
    """
    head = f"## {prose(document.title, 600)}" if document.headline else ""
    if document.about:
        head += f"\n\n{prose(document.about, 600)}"
    # readers of a ticket may not know what reports there; a table by itself says nothing of anybody
    signature = f"Reported by {_reporter()}." if document.headline else ""
    last = "\n\n".join(filter(None, (prose(document.last_line, 600), signature)))
    room = limit - size(head) - size(last) - 200
    page = "\n\n".join(filter(None, (head, _fitted(_section, document.sections, room), last)))
    return page.rstrip("\n") + "\n"


def _reporter() -> str:
    """The program with its version, and the project's address where the package's metadata has one."""
    try:
        known = metadata("dtypedoctor").get_all("Project-URL") or []
    except PackageNotFoundError:
        known = []
    addresses = [one.partition(", ")[2] for one in known]
    return ", ".join([f"dtypedoctor {__version__}", *addresses[:1]])


def _fitted(draw: Callable[[_Thing, int], str], things: Sequence[_Thing], room: int) -> str:
    """Everything drawn, one below the other, in at most ``room`` bytes."""
    drawn = [draw(thing, room) for thing in things]
    rooms = shares([size(text) + 2 for text in drawn], room - _NOTE)
    page, left_out = "", 0
    for thing, text, given in zip(things, drawn, rooms, strict=True):
        if not text:
            continue
        shown = text
        if size(text) + 2 > given:
            shown = draw(thing, given - 2) if given > _LEAST else ""
        if shown and size(page) + size(shown) + 2 <= room - _NOTE:
            page += f"{shown}\n\n"
        else:
            left_out += 1
    if left_out:
        page += _left_out(left_out, "parts")
    return page.rstrip("\n")


def _section(section: Section, room: int) -> str:
    title = f"### {prose(section.title, 200)}\n\n" if section.title else ""
    return title + _fitted(_block, section.blocks, room - size(title))


def _block(block: Block, room: int) -> str:
    match block:
        case Heading():
            return f"**{prose(block.text[:1].upper() + block.text[1:])}**"
        case Paragraph():
            shown = _line(block.line, TEXT_LIMIT)
            return shown if size(shown) <= room else _line(block.line, max(1, room // 10))
        case Facts():
            return table(["", ""], [[f"**{prose(label)}**", _line(line)] for label, line in block.rows], room)
        case Table():
            rows = [[_line(cell) for cell in row] for row in block.rows]
            header = block.header or ("",) * len(rows[0])
            caption = f"\n\n{prose(block.caption)}" if block.caption else ""
            return table([prose(title) for title in header], rows, room - size(caption)) + caption
        case Items():
            return bullets([_line(item, 600) for item in block.items], room)
        case Code():
            return fenced(block.text, block.language, room)
        case Fold():
            summary = "".join(map(_as_html, parts_of(block.title)))  # inside of it Markdown is not read
            body = _fitted(_block, block.blocks, room - 800)
            return f"<details>\n<summary>{summary}</summary>\n\n{body}\n\n</details>"
        case Beside():
            return _fitted(_block, tuple(chain(block.left, block.right)), room)


def _line(line: Line, limit: int = _CELL) -> str:
    return "".join(_inline(part, limit) for part in parts_of(line))


def _inline(part: Inline, limit: int) -> str:
    if isinstance(part, Bar):
        full = round((part.fill or 0.0) * _BAR)
        return ABSENT if part.fill is None else f"`{'█' * full}{'░' * (_BAR - full)}`"
    if isinstance(part, str):
        return _spaced(part, prose(part, limit))
    if part.look is Look.NAME:
        return code(part.text, limit)
    shown = prose(part.text, limit)
    strong = shown and part.look not in (Look.PLAIN, Look.DIM, Look.LINK)
    return _spaced(part.text, f"**{shown}**" if strong else shown)


def _spaced(text: str, shown: str) -> str:
    """``shown`` with the spaces that join ``text`` to its neighbors."""
    before, after = " " * text.startswith(" "), " " * (text.endswith(" ") and bool(text.strip()))
    return f"{before}{shown}{after}"


def _as_html(part: Inline) -> str:
    if isinstance(part, Bar):
        return ""
    text, named = (part.text, part.look is Look.NAME) if isinstance(part, Words) else (part, False)
    shown = _spaced(text, _ENTITY.sub(lambda match: f"&#{ord(match[0])};", one_line(text, 300).strip()))
    return f"<code>{shown}</code>" if named else shown.replace("&#64;", "&#64;&#8203;")


def size(text: str) -> int:
    """What ``text`` counts against GitHub's limit, taken in UTF-8 bytes so that no way of counting is above it."""
    return len(text.encode("utf-8"))


@lru_cache(4096)
def prose(text: str, limit: int = TEXT_LIMIT) -> str:
    """``text`` on one line as running text: no markup, no mention of anybody, fit for a table cell too."""
    parts = one_line(text, limit).strip().split("`")
    if len(parts) % 2 == 0:  # not pairs
        parts = ["`".join(parts)]
    shown = "".join(code(part) if position % 2 else _MARKUP.sub(_escaped, part) for position, part in enumerate(parts))
    return _LEADING.sub(r"\1\\\2", shown)


@lru_cache(4096)
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
    return _cut(lines, [_row(row) for row in rows], room, "rows")


def bullets(items: Sequence[str], room: int) -> str:
    """A list of finished items in at most ``room`` bytes, items that do not fit left out with a note."""
    return _cut([], [f"- {item}" for item in items], room, "items")


def fenced(text: str, language: str, room: int) -> str:
    """A code block in at most ``room`` bytes, lines that do not fit left out with a note."""
    shown = paragraphs(text, max(room, 1))
    longest = max((len(run) for run in re.findall(r"`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    lines = shown.split("\n")
    kept = _fitting(lines, room - 2 * size(fence) - size(language) - _NOTE)
    block = "\n".join([fence + language, *lines[:kept], fence])
    return block if kept == len(lines) else f"{block}\n\n{_left_out(len(lines) - kept, 'lines')}"


def _escaped(match: re.Match[str]) -> str:
    references = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "@&#8203;"}
    return references.get(match[0], "\\" + match[0])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cut(head: list[str], body: list[str], room: int, what: str) -> str:
    whole = "\n".join([*head, *body])
    if size(whole) <= room:
        return whole
    kept = _fitting(body, room - size("\n".join(head)) - _NOTE)
    return "\n".join([*head, *body[:kept], "", _left_out(len(body) - kept, what)])


def _fitting(lines: Sequence[str], room: int) -> int:
    used = 0
    for position, line in enumerate(lines):
        used += size(line) + 1
        if used > room:
            return position
    return len(lines)


def _left_out(count: int, what: str) -> str:
    return f"*{count:,} more {what} left out to stay within GitHub's limit; report.json has them.*"


FORMAT = Format(name="md", suffix=".md", render=render_markdown)
