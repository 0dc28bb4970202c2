"""The part of a terminal that keeps changing while something runs."""

from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from dtypedoctor.report.text import one_line

__all__ = ["Region"]


class Region:
    """Shows what changes at the foot of a terminal; elsewhere only the lines that stay. Use as a context manager.

    Args:
        stream: usually ``sys.stderr``.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._console = Console(file=stream, highlight=False)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._stream.isatty():
            self._live = Live(console=self._console, refresh_per_second=10, transient=True)
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, tb)

    @property
    def changes(self) -> bool:
        """Whether there is a terminal to change, and it is entered."""
        return self._live is not None

    @property
    def width(self) -> int:
        """Columns."""
        return self._console.width

    def show(self, content: RenderableType) -> None:
        """Shows ``content`` in the place of what was shown before."""
        if self._live is not None:
            self._live.update(content)

    def leave(self, line: str, *, cut: bool = False) -> None:
        """Leaves a line for good; ``cut`` lets it end where the terminal does."""
        line = one_line(line, 2000) if line.strip() else line
        if self._live is None:
            print(line, file=self._stream, flush=True)
        else:
            self._live.console.print(Text(line[: self.width] if cut else line))
