"""A page at the prompt: lines, headings, tables and lists on a console, whatever the texts may hold."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dtypedoctor.report.text import ascii_only, paragraphs

__all__ = ["Page"]


class Page:
    """The console, with every text made safe for it.

    Args:
        console: where it goes; as wide as it is, without colour where it has none.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ascii = console.options.ascii_only
        self.width = console.width

    def text(self, text: str, style: str = "") -> Text:
        """``text`` made safe, and spelt in ASCII where the console knows no more."""
        shown = paragraphs(text)
        return Text(ascii_only(shown) if self._ascii else shown, style=style, overflow="fold")

    def line(self, text: str, style: str = "", indent: int = 0) -> None:
        """A line or a paragraph."""
        self._console.print(Padding(self.text(text, style), (0, 0, 0, indent), expand=False), highlight=False)

    def command(self, text: str) -> None:
        """A command to be typed next: on one line whatever the width, so that it can be copied."""
        self._console.print(Text("  ").append_text(self.text(text, "bold")), highlight=False, soft_wrap=True)

    def gap(self) -> None:
        """An empty line."""
        self._console.print()

    def heading(self, title: str) -> None:
        """The title of a part, with space before it."""
        self.gap()
        self.line(title, style="bold")

    def table(self, rows: Iterable[Sequence[Text]], header: Sequence[str] = (), indent: int = 2) -> None:
        """Columns without lines; cells that are too long are folded."""
        body = list(rows)
        if not body:
            return
        table = Table(box=None, show_header=bool(header), padding=(0, 2, 0, 0), pad_edge=False)
        for i in range(len(body[0])):
            table.add_column(self.text(header[i], "dim") if header else "", overflow="fold")
        for row in body:
            table.add_row(*row)
        self._console.print(Padding(table, (0, 0, 0, indent), expand=False), highlight=False)

    def bullets(self, title: str, items: Sequence[str]) -> None:
        """A list under its title; nothing at all without items."""
        if items:
            self.line(title, style="dim", indent=2)
            self.table(([self.text("-"), self.text(item)] for item in items), indent=4)
