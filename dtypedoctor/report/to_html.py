"""Documents as one HTML file that opens from disk and asks the network for nothing.

First the parts: elements as text, and charts as inline SVG. Whatever is not an element already is escaped, so nothing that comes
from elsewhere becomes markup. Then the page.
"""

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from urllib.parse import quote

from dtypedoctor import __version__
from dtypedoctor.report.document import (
    Bar,
    Beside,
    Block,
    Chart,
    Code,
    Document,
    Facts,
    Fold,
    Heading,
    Inline,
    Items,
    Line,
    Look,
    Map,
    Paragraph,
    Section,
    Table,
    Words,
    parts_of,
)
from dtypedoctor.report.pictures import map_data
from dtypedoctor.report.text import ABSENT, number, one_line, paragraphs


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
    body = (el("tr", _first_cell(row[0]), *(el("td", cell) for cell in row[1:])) for row in rows)
    named = el("caption", caption) if caption else Html()
    inner = el("table", named, head, el("tbody", *body))
    return el("div", inner, class_="scroll", tabindex="0", role="region", aria_label=label or caption or "table")


def _first_cell(name: str) -> Html:
    """Names its row, where it says anything."""
    return el("th", name, scope="row") if name else el("td")


_WIDTH, _HEIGHT = 360, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 10, 12, 22

Values = Sequence[float | None]


def line_chart(title: str, lines: Sequence[tuple[str, Values]]) -> Html:
    """One line per run over the steps; a missing or non-finite value is a gap, a lone value a dot.

    Lines differ in dash and marker as well as in color. Returns nothing if there is no finite value at all.
    """
    known = _finite_values(lines)
    longest = max((len(values) for _, values in lines), default=0)
    if not known or longest < 2:
        return Html()
    frame = _Frame(longest, *_scale(min(known), max(known)))
    drawn = [frame.line(index, values) for index, (_, values) in enumerate(lines)]
    drawn = [frame.axes(), *reversed(drawn)]  # the first run, usually the shortest, lies on top
    picture = el("svg", *drawn, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=f"{title} per step")
    legend = el("ul", *(_entry(index, label) for index, (label, values) in enumerate(lines) if values), class_="legend")
    return el("figure", el("figcaption", f"{title} per step"), picture, legend, class_="chart")


def _finite_values(lines: Sequence[tuple[str, Values]]) -> list[float]:
    return [value for _, values in lines for value in values if value is not None and math.isfinite(value)]


def _scale(low: float, high: float) -> tuple[float, float]:
    """The ends of the axis; around a single value there is room on both sides."""
    if low == high:
        room = (abs(low) or 1.0) * 0.5
        return low - room, high + room
    return low, high


class _Frame:
    def __init__(self, steps: int, low: float, high: float) -> None:
        self._steps, self._low, self._high = steps, low, high

    def _x(self, step: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / (self._steps - 1)

    def _y(self, value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - (value - self._low) / (self._high - self._low))

    def axes(self) -> Html:
        parts = []
        for value in (self._low, (self._low + self._high) / 2, self._high):
            y = f"{self._y(value):.1f}"
            parts.append(el("path", d=f"M{_LEFT} {y}H{_WIDTH - _RIGHT}", class_="grid"))
            parts.append(
                el("text", number(value), x=str(_LEFT - 5), y=f"{self._y(value) + 3.5:.1f}", text_anchor="end")
            )
        for step in sorted({0, self._steps // 2, self._steps - 1}):
            anchor = {0: "start", self._steps - 1: "end"}.get(step, "middle")
            parts.append(el("text", str(step + 1), x=f"{self._x(step):.1f}", y=str(_HEIGHT - 6), text_anchor=anchor))
        return join(parts)

    def line(self, index: int, values: Values) -> Html:
        path, points, pen_down = [], [], False
        for step, value in enumerate(values):
            if value is None or not math.isfinite(value):
                pen_down = False
                continue
            place = f"{self._x(step):.1f} {self._y(value):.1f}"
            path.append(f"{'L' if pen_down else 'M'}{place}")
            points.append(f"M{place}h0")
            pen_down = True
        marks = "".join(points) if len(values) <= 60 else ""
        return join(
            (
                el("path", d="".join(path), class_=f"line run{index % 6}"),
                el("path", d=marks, class_=f"dots run{index % 6}") if marks else Html(),
            )
        )


def _entry(index: int, label: str) -> Html:
    sample = el("svg", el("path", d="M0 5H26", class_=f"line run{index % 6}"), viewBox="0 0 26 10", aria_hidden="true")
    return el("li", sample, label)


_SCRIPTS = ("page.js", "modules.js", "explorer.js", "detail.js", "controls.js")
"""Plain scripts that share one scope, in this order."""
_CELL = 1000
_CLASSES = {Look.DIM: "dim", Look.GOOD: "good", Look.BAD: "warn", Look.WARN: None, Look.STRONG: None}


def render_html(document: Document) -> str:
    """The document as a self-contained page.

    A content security policy allows this page's own style and script by their hashes and nothing else, so that a text
    that should slip through the escaping still cannot run or load anything.
    """
    style, script = _asset("report.css"), "\n".join(map(_asset, _SCRIPTS))
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    draw = _Blocks(leads=document.map is not None)
    sections = [draw.section(section, document if first else None) for first, section in _with_first(document)]
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
        f'<script type="application/json" id="data">{map_data(document.map)}</script>',
        f"<script>{script}</script></body></html>\n",
    )
    return "".join(page)


def _with_first(document: Document) -> Iterable[tuple[bool, Section]]:
    """The sections, the first of which carries the headline; one that has a title of its own gets an empty one before it."""
    sections = document.sections
    if not sections or sections[0].title:
        sections = (Section("", ()), *sections)
    return ((position == 0, section) for position, section in enumerate(sections))


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


def _header(document: Document) -> Html:
    """Status, labels and what it is about above the headline."""
    status = [Words(document.status, Look.GOOD if document.good else Look.BAD)] if document.status else []
    pills = [join((el("span", words.text, class_=_pill(words)), " ")) for words in (*status, *document.labels)]
    about = el("span", one_line(document.about, 600), class_="dim")
    title = el("h1", one_line(document.headline, 600)) if document.headline else el("h1", one_line(document.name))
    return el("header", el("p", *pills, about), title)


def _pill(words: Words) -> str:
    return {Look.GOOD: "pill good", Look.BAD: "pill"}.get(words.look, "pill plain")


class _Blocks:
    """Draws blocks; names of modules lead to the map where the page has one."""

    def __init__(self, *, leads: bool) -> None:
        self._leads, self._title = leads, ""
        self._labels: Counter[str] = Counter()

    def section(self, section: Section, headed: Document | None) -> Html:
        title = el("h2", one_line(section.title)) if section.title else Html()
        head = _header(headed) if headed is not None else Html()
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
                code = _diff(block.text) if block.language == "diff" else text(block.text)
                scrolls = "asis" if block.language == "text" else None  # a caret stands below what it marks
                pre = el("pre", el("code", code), class_=scrolls, tabindex="0" if scrolls else None)
                return el("div", pre, copy, class_="copyable")
            case Chart():
                return line_chart(block.title, [(one_line(run, 60), values) for run, values in block.lines])
            case Fold():
                return el("details", el("summary", self._line(block.title)), self.blocks(block.blocks))
            case Beside():
                charts = all(isinstance(one, Chart) for one in block.right)
                right = el("div", self.blocks(block.right), class_="charts" if charts else "story")
                return el("div", el("div", self.blocks(block.left)), right, class_="beside" if charts else "finding")
            case Map():
                missing = el("noscript", el("p", "This part needs JavaScript.", class_="warn"))
                return join((missing, el("div", id="explorer")))

    def _label(self, name: str, join: str = " ") -> str:
        """A name that no other part of the page has, of tables for screen readers and of anchors: numbered from the second on."""
        self._labels[name] += 1
        return f"{name}{join}{self._labels[name]}" if self._labels[name] > 1 else name

    def _anchor(self, name: str) -> Html:
        """A link to the line that it ends, to be copied."""
        anchor = self._label("-".join(one_line(name).split()), "-")
        link = el("a", "#", href=f"#{quote(anchor)}", class_="anchor", aria_label=f"Link to {anchor}")
        return el("span", " ", link, id=anchor)

    def _line(self, line: Line, limit: int | None = _CELL) -> Html:
        return join(self._inline(part, limit) for part in parts_of(line))

    def _inline(self, part: Inline, limit: int | None) -> str:
        if isinstance(part, Bar):
            return _bar(part)
        if isinstance(part, str):
            return _with_code(_cut(part, limit))
        if part.anchor:
            return self._anchor(part.anchor)
        shown = _cut(part.text, limit)
        match part.look:
            case Look.PLAIN:
                return shown
            case Look.MODULE if self._leads:
                named = el("code", one_line(part.text))
                show = el("span", "show", class_="dim")
                return el(
                    "button",
                    named,
                    " ",
                    show,
                    type="button",
                    class_="goto",
                    data_fqn=one_line(part.target or part.text),
                )
            case Look.NAME | Look.MODULE:
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


def _bar(bar: Bar) -> Html:
    if bar.fill is None:
        return Html(ABSENT)
    level = "bad" if bar.bad else f"l{min(9, int(bar.fill * 10))}"
    track = el("rect", width="100", height="10", class_="track")
    full = el("rect", width=f"{bar.fill * 100:.1f}", height="10", class_=f"cell {level}")
    return el("svg", track, full, viewBox="0 0 100 10", class_="bar", aria_hidden="true")
