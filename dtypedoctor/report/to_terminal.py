"""Documents at the prompt: 80 columns and up, and nothing that only color says."""

from collections.abc import Callable, Iterable, Sequence
from math import ceil

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

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
    Table,
    Words,
    parts_of,
    shares,
)
from dtypedoctor.text import ABSENT, ascii_only, breaks, one_line, paragraphs, words

_STYLES = {
    Look.STRONG: "bold",
    Look.DIM: "dim",
    Look.GOOD: "bold green",
    Look.WARN: "yellow",
    Look.BAD: "bold red",
}
_CELL, _BAR, _SHORT_BAR, _LABEL = 400, 14, 6, 20
"""Characters of a cell, of a bar, of one in a terminal below 80 columns, and of the first cell of a row, up to which it is not folded where there is
room."""
_INDENT, _GAP, _TALLEST = 2, 2, 4
"""Columns in front of what stands in a section, columns between two columns of a table, and the most lines of a cell before a row becomes a block of its own."""


def print_document(document: Document, console: Console) -> None:
    """Prints ``document``, as wide as the console is, without color where the console has none; in a log no line ends in spaces."""
    if console.is_terminal:
        _draw(document, console)
        return
    with console.capture() as drawn:
        _draw(document, console)
    console.file.write("\n".join(line.rstrip() for line in drawn.get().split("\n")))


def _draw(document: Document, console: Console) -> None:
    page = _Page(console)
    if document.headline:
        style = {True: "bold green", False: "bold red", None: "bold"}[document.good]
        page.line(one_line(document.title, 1000), style, indent=0)
    if document.about:
        page.line(one_line(document.about, 600), "dim", indent=0)
    for position, section in enumerate(document.sections):
        if document.headline or position:
            page.gap()
        if section.title:
            page.line(one_line(section.title), "bold", indent=0)
        page.blocks(section.blocks)
    if document.next_command:
        page.gap()
        page.line(document.next_title, "bold", indent=0)
        page.block(Code(document.next_command))
    if document.last_line:
        page.gap()
        page.line(one_line(document.last_line, 600), indent=0)


class _Page:
    """The console, with every text made safe for it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ascii = console.options.ascii_only
        self.width = console.width
        self._indent = _INDENT

    def blocks(self, blocks: Iterable[Block]) -> None:
        """One below the other; what stands under a heading is set in further than it."""
        self._indent = _INDENT
        after_code = False
        for block in blocks:
            if after_code:
                self.gap()
            after_code = isinstance(block, Code)
            if isinstance(block, Heading):
                self.line(block.text, "dim")
                self._indent = 2 * _INDENT
            else:
                self.block(block)

    def block(self, block: Block) -> None:
        """Draw a block; a heading is printed with what follows it."""
        match block:
            case Paragraph():
                self.line(self._joined(block.line, paragraphs), _STYLES.get(block.look, ""), self._indent)
            case Facts():
                self._grid([[self._text(label, "dim"), self._cell(line)] for label, line in block.rows])
            case Table():
                self._table(block)
            case Items():
                self._grid([[self._text("-"), self._cell(item)] for item in block.items])
            case Code():
                # Not folded, whatever the width, so that it can be copied
                colors = {"-": "red", "+": "green"} if block.language == "diff" else {}
                for line in paragraphs(block.text).split("\n"):
                    shown = self._text(line, colors.get(line[:1], "bold"))
                    self._console.print(Text("  ").append_text(shown), highlight=False, soft_wrap=True)
            case Fold():
                self._folded(block)
            case Beside():
                self.blocks(block.left)
                self.gap()
                self.blocks(block.right)

    def line(self, text: str | Text, style: str = "", indent: int = 2) -> None:
        shown = self._text(text, style) if isinstance(text, str) else text
        if isinstance(text, Text) and style:
            shown.style = style
        folded = Text("\n").join(_folded(part, self.width - indent) for part in shown.split("\n", allow_blank=True))
        folded.style = shown.style
        self._console.print(Padding(folded, (0, 0, 0, indent), expand=False), highlight=False)

    def gap(self) -> None:
        self._console.print()

    def _folded(self, block: Fold) -> None:
        if block.brief is None:
            self.gap()
            self.line(self._joined(block.title), "bold")
            self.blocks(block.blocks)
        elif block.brief:
            self.line(block.brief, "dim")

    def _table(self, table: Table) -> None:
        rows = [[self._cell(line) for line in row] for row in table.rows]
        header = [self._text(title, "dim") for title in table.header]
        widths = _widths([header, *rows] if header else rows, self.width - self._indent)
        if header and not all(_fits(row, widths) for row in rows):
            for row in rows:
                self._row_as_block(header, row)
        else:
            self._grid(rows, header)
        if table.caption:
            self.line(table.caption, "dim", self._indent)

    def _row_as_block(self, header: Sequence[Text], row: Sequence[Text]) -> None:
        """A row under its first cell, one labelled cell a line; where that is a mark or nothing, under the second."""
        lead = 1 if len(row[0].plain) > 1 else 2
        name = Text(" ").join(cell for cell in row[:lead] if cell.plain)
        self._console.print(Padding(name, (0, 0, 0, self._indent), expand=False), highlight=False)
        labelled = [[title, cell] for title, cell in zip(header[lead:], row[lead:], strict=True) if cell.plain]
        self._grid(labelled, indent=self._indent + _INDENT)

    def _grid(self, rows: Sequence[Sequence[Text]], header: Sequence[Text] = (), indent: int = 0) -> None:
        """Columns without rules; what is too long for its column is folded."""
        if not rows:
            return
        indent = indent or self._indent
        grid = Grid(box=None, show_header=bool(header), padding=(0, _GAP, 0, 0), pad_edge=False)
        widths = _widths([header, *rows] if header else rows, self.width - indent)
        for i, width in enumerate(widths):
            grid.add_column(_folded(header[i], width) if header else "", overflow="fold", width=max(1, width))
        for row in rows:
            grid.add_row(*(_folded(cell, width) for cell, width in zip(row, widths, strict=True)))
        self._console.print(Padding(grid, (0, 0, 0, indent), expand=False), highlight=False)

    def _cell(self, line: Line) -> Text:
        return self._joined(line, lambda text: one_line(text, _CELL))

    def _joined(self, line: Line, safe: Callable[[str], str] = one_line) -> Text:
        """A line with the looks of its parts."""
        parts = [self._inline(part, safe) for part in parts_of(line)]
        return parts[0] if len(parts) == 1 else Text(overflow="fold").join(parts)

    def _inline(self, part: Inline, safe: Callable[[str], str]) -> Text:
        if isinstance(part, Bar) and part.fill is not None:
            length = _BAR if self.width >= 80 else _SHORT_BAR
            full = round(part.fill * length)
            return self._text(f"|{'█' * full}{'░' * (length - full)}|")
        if isinstance(part, Bar):
            return self._text(ABSENT)
        text, look = (part.text, part.look) if isinstance(part, Words) else (part, Look.PLAIN)
        return self._text(safe(text), _STYLES.get(look, ""))

    def _text(self, text: str, style: str = "") -> Text:
        """``text`` made safe, and spelt in ASCII where the console knows no more."""
        shown = paragraphs(text)
        return Text(ascii_only(shown) if self._ascii else shown, style=style, overflow="fold")


def _widths(rows: Sequence[Sequence[Text]], room: int) -> list[int]:
    """Of each column: as wide as its longest cell where there is room, else if possible as wide as its longest word."""
    columns = range(len(rows[0]))
    needs = [max(_width(row[i]) for row in rows) for i in columns]
    room -= _GAP * (len(needs) - 1)
    for parts in (False, True):
        longest = [max(_longest_word(row[i], parts=parts) for row in rows) for i in columns]
        longest[0] = min(needs[0], max(longest[0], _LABEL))
        if sum(longest) <= room:
            more = shares([need - least for need, least in zip(needs, longest, strict=True)], room - sum(longest))
            return [least + extra for least, extra in zip(longest, more, strict=True)]
    return shares(needs, room)


def _width(cell: Text) -> int:
    return max(map(cell_len, cell.plain.split("\n")))


def _longest_word(cell: Text, *, parts: bool) -> int:
    return max((cell_len(word.rstrip()) for word in words(cell.plain, parts=parts)), default=0)


def _fits(row: Sequence[Text], widths: Sequence[int]) -> bool:
    """Whether no cell is too tall and no word of one is broken."""
    cells = list(zip(row, widths, strict=True))
    return all(
        ceil(_width(cell) / max(1, width)) <= _TALLEST and _longest_word(cell, parts=True) <= width
        for cell, width in cells
    )


def _folded(cell: Text, width: int) -> Text:
    """Rich breaks lines at spaces only; ids such as float16-overflow are better broken at their hyphens, names at their dots."""
    if _width(cell) <= width:
        return cell
    lines = cell.divide(breaks(cell.plain, width))
    for line in lines:
        line.rstrip()
    return Text("\n", style=cell.style, overflow="fold").join(lines)
