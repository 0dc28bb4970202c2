"""Consoles that suit where the text goes."""

import os
from typing import TextIO

from rich.console import Console

PLAIN_WIDTH = 100
"""Columns when the output is not a terminal."""

_NARROWEST, _WIDEST = 40, 1000
"""Columns between which ``COLUMNS`` is heeded."""


def console_for(stream: TextIO) -> Console:
    """A console on ``stream``: as wide as the terminal (80 columns at least); plain, 100 columns, when it is piped."""
    terminal = stream.isatty()
    if not terminal:
        return Console(file=stream, width=_columns(), no_color=True, force_terminal=False,
                       legacy_windows=False, highlight=False)  # fmt: skip
    console = Console(file=stream, highlight=False)
    return console if console.width >= 80 else Console(file=stream, highlight=False, width=80)


def _columns() -> int:
    """What ``COLUMNS`` says, where that is a number of columns."""
    said = os.environ.get("COLUMNS", "")
    wanted = int(said[:9]) if said.isascii() and said.isdigit() else 0
    return min(max(wanted, _NARROWEST), _WIDEST) if wanted else PLAIN_WIDTH
