"""Documents as one HTML file that opens from disk and asks the network for nothing.

First the parts: elements as text. Whatever is not an element already is escaped, so nothing that comes
from elsewhere becomes markup. Then the page.
"""

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

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
)
from dtypedoctor.text import ABSENT, one_line, paragraphs
from dtypedoctor.version import __version__


class Html(str):
    """Finished HTML."""

    __slots__ = ()


def text(value: str) -> Html:
    """``value`` as HTML text, invisible characters made visible."""
    return value if isinstance(value, Html) else Html(escape(paragraphs(value, 20_000), quote=True))


def join(parts: Iterable[str]) -> Html:
    """The parts one after the other."""
    return Html("".join(text(part) for part in parts))


def el(tag: str, *children: str, **attributes: str | None) -> Html:
    """The element ``tag`` with ``children``.

    Attribute names lose a trailing underscore and their other underscores become hyphens (``class_``, ``data_fqn``);
    attributes of None are left out.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{text(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{written}>{join(children)}</{tag}>")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", *, label: str = "") -> Html:
    """A table whose first column names its rows; it scrolls sideways where the page is too narrow for it."""
    head = (
        el("thead", el("tr", *(el("th", cell, scope="col") if cell else el("td") for cell in header)))
        if header
        else Html()
    )
    body = []
    for name, *cells in rows:
        first = el("th", name, scope="row") if name else el("td")
        body.append(el("tr", first, *(el("td", cell) for cell in cells)))
    named = el("caption", caption) if caption else Html()
    inner = el("table", named, head, el("tbody", *body))
    return el("div", inner, class_="scroll", tabindex="0", role="region", aria_label=label or caption or "table")


_CELL = 1000
_CLASSES = {Look.DIM: "dim", Look.GOOD: "good", Look.BAD: "warn", Look.WARN: None, Look.STRONG: None}


def render_html(document: Document) -> str:
    """The document as a self-contained page.

    A content security policy allows this page's own style and script by their hashes and nothing else, so that a text
    that should slip through the escaping still cannot run or load anything.
    """
    style, script = _asset("report.css"), _asset("page.js")
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    draw = _Blocks()
    first, *others = document.sections or (Section("", ()),)
    if first.title:  # the headline stands in a section of its own
        first, others = Section("", ()), [first, *others]
    # status, labels and what it is about above the headline
    status = [Words(document.status, Look.GOOD if document.good else Look.BAD)] if document.status else []
    looks = {Look.GOOD: "pill good", Look.BAD: "pill"}
    labels = (*status, *document.labels)
    pills = [join((el("span", label.text, class_=looks.get(label.look, "pill plain")), " ")) for label in labels]
    about = el("span", one_line(document.about, 600), class_="dim")
    title = el("h1", _with_code(one_line(document.headline or document.name, 600)))
    sections = [draw.section(first, el("header", el("p", *pills, about), title)), *map(draw.section, others)]
    page = (
        "<!doctype html>\n",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        el("title", f"{one_line(document.name, 80)} – dtypedoctor"),
        f"<style>{style}</style></head><body>",
        _top(document),
        el("main", *sections, *([el("p", one_line(document.last_line, 600))] if document.last_line else [])),
        el("footer", f"Made by dtypedoctor {__version__}. This page is one file and loads nothing."),
        f"<script>{script}</script></body></html>\n",
    )
    return "".join(page)


def _asset(name: str) -> str:
    return resources.files("dtypedoctor.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")


def _top(document: Document) -> Html:
    links = [el("a", one_line(s.short or s.title), href=f"#{s.anchor}") for s in document.sections if s.anchor]
    return el(
        "header",
        el("strong", "dtypedoctor", class_="brand"),
        el("nav", *links, aria_label="Sections"),
        el("button", "Light / dark", type="button", id="theme"),
        class_="top",
    )


class _Blocks:
    """Draws blocks, and remembers which names the page has given away."""

    def __init__(self) -> None:
        self._title = ""
        self._labels: Counter[str] = Counter()

    def section(self, section: Section, head: str = "") -> Html:
        title = el("h2", one_line(section.title)) if section.title else Html()
        self._title = one_line(section.title)
        return el("section", head, title, self.blocks(section.blocks), id=section.anchor or None, class_="card")

    def blocks(self, blocks: Iterable[Block]) -> Html:
        return join(map(self._block, blocks))

    def _block(self, block: Block) -> Html:
        match block:
            case Heading():
                heading = block.text[:1].upper() + block.text[1:]
                return el("h3", heading) if self._title else el("h2", heading, class_="small")
            case Paragraph():
                return el("p", self._line(block.line, None), class_=_CLASSES.get(block.look))
            case Facts():
                facts = (join((el("dt", one_line(label)), el("dd", self._line(line)))) for label, line in block.rows)
                return el("dl", *facts, class_="facts")
            case Table():
                rows = ([self._line(cell) for cell in row] for row in block.rows)
                return table(block.header, rows, block.caption, label=self._label(block.caption or self._title))
            case Items():
                items = (el("li", self._line(item)) for item in block.items)
                return el("ol" if block.chain else "ul", *items, class_="chain" if block.chain else None)
            case Code():
                copy = el("button", "Copy", type="button", class_="copy")
                draw = {"diff": _diff, "text": _marked}.get(block.language, text)
                return el("div", el("pre", el("code", draw(block.text))), copy, class_="copyable")
            case Fold():
                return el("details", el("summary", self._line(block.title)), self.blocks(block.blocks))
            case Beside():
                right = el("div", self.blocks(block.right), class_="story")
                return el("div", el("div", self.blocks(block.left)), right, class_="finding")

    def _label(self, name: str) -> str:
        """A name that no other table of the page has, for screen readers: numbered from the second on."""
        self._labels[name] += 1
        return f"{name} {self._labels[name]}" if self._labels[name] > 1 else name

    def _line(self, line: Line, limit: int | None = _CELL) -> Html:
        return join(self._inline(part, limit) for part in parts_of(line))

    def _inline(self, part: Inline, limit: int | None) -> str:
        if isinstance(part, Bar):
            if part.fill is None:
                return Html(ABSENT)
            level = "bad" if part.bad else f"l{min(9, int(part.fill * 10))}"
            track = el("rect", width="100", height="10", class_="track")
            full = el("rect", width=f"{part.fill * 100:.1f}", height="10", class_=f"cell {level}")
            return el("svg", track, full, viewBox="0 0 100 10", class_="bar", aria_hidden="true")
        if isinstance(part, str):
            return _with_code(_cut(part, limit))
        shown = _cut(part.text, limit)
        match part.look:
            case Look.PLAIN:
                return shown
            case Look.NAME:
                return el("code", shown)
            case Look.LINK if part.text.startswith("https://") and part.text == shown:
                return el("a", shown, href=shown, rel="noreferrer noopener")
            case Look.LINK:
                return shown
            case Look.DIM:
                return el("span", shown, class_="dim")
            case _:
                return el("strong", shown, class_=_CLASSES[part.look])


def _diff(lines: str) -> Html:
    """A unified diff, what goes and what comes in colors of their own."""
    looks = {"-": "goes", "+": "comes"}
    drawn = (el("span", line, class_=looks.get(line[:1])) for line in lines.split("\n"))
    return Html("\n".join(drawn))


_CARETS = re.compile(r"( *\| )( *)(\^+)")


def _marked(lines: str) -> Html:
    """Lines of source in which what carets stand below is marked, in the place of the carets: long lines wrap on a narrow screen."""
    drawn: list[Html] = []
    before = ""
    for line in lines.split("\n"):
        carets = _CARETS.fullmatch(line)
        if carets is not None and drawn:
            begin, end = carets.start(3), carets.end(3)
            drawn[-1] = join((before[:begin], el("mark", before[begin:end]), before[end:]))
        else:
            drawn.append(text(line))
        before = line
    return Html("\n".join(drawn))


def _with_code(sentence: str) -> Html:
    """A sentence in which what stands between backticks is code."""
    parts = sentence.split("`")
    if len(parts) % 2 == 0:
        return text(sentence)
    return join(el("code", part) if position % 2 else part for position, part in enumerate(parts))


def _cut(text: str, limit: int | None) -> str:
    """``text`` on one line with the spaces that join it to its neighbors; as it is without a limit."""
    if limit is None or not text.strip():
        return text
    return f"{' ' * text.startswith(' ')}{one_line(text, limit).strip()}{' ' * text.endswith(' ')}"


FORMAT = Format(name="html", suffix=".html", render=render_html)
