"""Names, messages and numbers made fit to show: nothing invisible, nothing that reorders, nothing endless."""

import linecache
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dtypedoctor.dtypes import DTYPES

NAME_LIMIT = 200
TEXT_LIMIT = 2000
QUOTE_LIMIT = 60
_LONGEST_ID = 100
"""Nobody misspells an id into more, and comparing long texts takes quadratic time."""

SHARE = r"^(off|auto|1/[1-9][0-9]{0,3}|([1-9][0-9]?(\.[0-9]{1,3})?|0\.([1-9][0-9]{0,2}|0[1-9][0-9]?|00[1-9]))%)$"
"""How it is written how much may be left unmeasured: `5%` of the time, in `1/16` of the steps, `off` for nothing, `auto` for the default share."""

_ASCII = str.maketrans({
    "→": "->", "←": "<-", "×": "x", "…": "...", "–": "-", "—": "-", "≤": "<=", "≥": ">=", "±": "+/-", "≈": "~", "·": "*",
    "“": '"', "”": '"', "‘": "'", "’": "'", "µ": "u", "−": "-", "∞": "inf", "█": "#", "░": ".", "▶": ">", "✔": "+", "✘": "x",
})  # fmt: skip
_PIECES = re.compile(r"-*[^\s-](?:[^\s-]|-(?![^\W\d_]))*-(?=[^\W\d_])|-*[^\s-](?:[^\s-]|-(?![^\W\d_]))*|\s+|-+")
"""What stays on one line. A hyphen before a digit is a sign, one before a word that of an option."""
_PARTS = re.compile(r"[^._/]*[._/]+(?=\w)(?!py\b)|.+", re.DOTALL)
"""What dotted names and paths may be broken into; the name of a file stays with its ending."""


def one_line(text: str, limit: int = NAME_LIMIT) -> str:
    """``text`` on one line, with whatever cannot be seen written as an escape (``\\x1b``, ``\\u202e``).

    Line breaks, tabs and unusual spaces become single spaces. What is longer than ``limit`` characters loses its middle,
    because the end of a dotted name says most: whole words where there are some, else characters.
    """
    if not text.isprintable():
        text = _escape(" ".join(text[: 4 * limit + TEXT_LIMIT].split()))
    if len(text) <= limit:
        return text
    half, rest = limit // 2, len(text) - (limit - limit // 2 - 1)
    begin = text.rfind(" ", half // 3, half + 1)
    end = _BOUNDARY.search(text, rest - 1, len(text) - half // 3)
    return text[: min(begin + 1, half) if begin >= 0 else half] + "…" + text[max(end.start(), rest) if end else rest :]


_BOUNDARY = re.compile("[ /]")


def clipped(text: str, limit: int) -> str:
    """A sentence on one line; what is longer than ``limit`` characters loses its end, because a word in the middle may turn its meaning."""
    shown = one_line(text, len(text) * 10)  # an escape has up to ten characters
    if len(shown) <= limit:
        return shown
    end = shown.rfind(" ", limit // 2, limit - 1)
    return shown[: end if end > 0 else limit - 2] + " …"


def paragraphs(text: str, limit: int = TEXT_LIMIT) -> str:
    """Like :func:`one_line`, but line breaks stay, a tab becomes four spaces, and what is too long loses its end."""
    shown = "\n".join(_escape(line.replace("\t", "    ")) for line in text[:limit].splitlines())
    left_out = len(text) - limit
    return f"{shown}… ({left_out:,} characters left out)" if left_out > 0 else shown


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """End a sentence with the choice that ``word`` most likely means, ``; did you mean 'seed'?``; empty where none is near.

    Of a whole part of several choices, as ``overflow`` is, three are named, the shortest first.
    """
    if len(word) > _LONGEST_ID:
        return ""
    from difflib import get_close_matches  # which few commands need

    folded = {choice.lower(): choice for choice in choices}
    having = [choice for choice in folded if word.lower() in re.split(r"[-_. ]", choice)]
    matches = sorted(having, key=len)[:3] or get_close_matches(word.lower(), folded, n=1)
    named = " or ".join(f"'{folded[match]}'" for match in matches)
    return f"; did you mean {named}?" if matches else ""


def quoted(text: str) -> str:
    """Put a text in quotes on one line, escaped where it does not print and shortened to 60 characters."""
    return repr(text if len(text) <= QUOTE_LIMIT else text[:QUOTE_LIMIT] + "…")


def printable(text: str | Path) -> str:
    """Escape what does not print in a text or path: line breaks, undecodable bytes of a file's name."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def words(text: str, *, parts: bool = False) -> list[str]:
    """What stays on one line: words with the space behind them, names up to a hyphen inside; with ``parts`` up to a dot, ``_`` or ``/`` too."""
    found = _PIECES.findall(text)
    return [part for word in found for part in _PARTS.findall(word)] if parts else found


def breaks(text: str, width: int) -> list[int]:
    """Where lines of at most ``width`` characters begin: at words, inside of longer ones at their parts (longer parts stay whole)."""
    starts: list[int] = []
    begin = at = 0
    for word in words(text):
        for piece in [word] if len(word) <= width else words(word, parts=True):
            if text[begin:at].strip() and at - begin + len(piece.rstrip()) > width:
                starts.append(at)
                begin = at
            at += len(piece)
    return starts


def ascii_only(text: str) -> str:
    """``text`` for a terminal that knows no more than ASCII: signs spelt out, other characters as escapes."""
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")


def _escape(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(
        c if c.isprintable() else " " if c.isspace() and c.isascii() else c.encode("unicode_escape").decode("ascii")
        for c in line
    )


_EXPONENT = re.compile(r"e\+?(-?)0*(?=\d)")
ABSENT = "–"
"""Stands for a number that is missing."""


def number(value: float | None) -> str:
    """Four significant digits, as people write them: ``1.234``, ``65,504``, ``3.403e38``, ``NaN``, ``-inf``."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return _not_finite(value)
    if 10_000 <= abs(value) < 1_000_000:
        return f"{value:,.0f}"
    return _EXPONENT.sub(r"e\1", f"{value:.4g}")


def count(value: int | None) -> str:
    """A whole number with thousands separated."""
    return ABSENT if value is None else f"{value:,}"


def counted(amount: int, one: str, several: str = "") -> str:
    """A number of things: ``1 step``, ``1,024 steps``; ``several`` where the plural is not made by an s."""
    return f"{amount:,} {one if amount == 1 else several or one + 's'}"


def duration(seconds: float | None) -> str:
    """Seconds, or milliseconds below one second."""
    if seconds is None:
        return ABSENT
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def memory(size: int | None) -> str:
    """Bytes in the binary unit that leaves one to four digits."""
    if size is None:
        return ABSENT
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def ratio(value: float | None) -> str:
    """A factor, e.g. ``1.05×``."""
    return ABSENT if value is None else f"{value:.3g}×"


def span(values: Sequence[float | None]) -> str:
    """The first and the last of a series, e.g. ``2.772 → 2.41``."""
    if not values:
        return ABSENT
    return " → ".join(_short(value) for value in (values[:1] if len(values) == 1 else (values[0], values[-1])))


def series(values: Sequence[float | None], limit: int = 12) -> str:
    """The values one after the other; beyond ``limit`` of them the middle is left out."""
    if len(values) <= limit:
        return " ".join(map(number, values)) or ABSENT
    head, tail = values[: limit - limit // 3], values[-(limit // 3) :]
    return f"{' '.join(map(number, head))} … {' '.join(map(number, tail))} ({len(values)} steps)"


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else str(value)


def _short(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return ABSENT if value is None else _not_finite(value)
    return _EXPONENT.sub(r"e\1", f"{value:.3g}")


def fill(absmax: float | None, dtype: str) -> float | None:
    """The place of ``absmax`` between the smallest normal value of ``dtype`` (0.0) and its largest (1.0), logarithmically.

    Returns None for dtypes without such a scale and where nothing was measured; zero and everything below the smallest
    normal value stand at 0.0.
    """
    known = DTYPES.get(dtype)
    if known is None or absmax is None:
        return None
    if absmax <= known.tiny:
        return 0.0
    return min(1.0, (math.log2(absmax) - math.log2(known.tiny)) / (math.log2(known.max) - math.log2(known.tiny)))


def limit(dtype: str) -> float | None:
    """The largest finite value of ``dtype``, or None if it is not a floating-point dtype."""
    known = DTYPES.get(dtype)
    return known.max if known else None


_CELL = "cell In["
"""A line of a notebook is named by its cell, in the kernel's own process only: the file that a cell is compiled under is a temporary name."""


def cell_of(path: str) -> str:
    """``cell In[3]`` for the file name under which IPython compiled that cell; empty for any other file."""
    if "ipykernel_" not in path and not path.startswith("<ipython-input-"):
        return ""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    named = shell.compile.format_code_name(path) if shell is not None else None
    return f"cell {named[1]}" if named is not None else ""


def cell_source(name: str) -> str | None:
    """The text of a cell, given by its name or by the file name it was compiled under; None for what is no cell."""
    label = name if name.startswith(_CELL) else cell_of(name)
    path = _paths_of_cells().get(label)
    return "".join(linecache.getlines(path)) if path is not None else None


def cells() -> list[str]:
    """The names of all cells that have run, the latest first."""
    return sorted(_paths_of_cells(), key=lambda name: (len(name), name), reverse=True)


def _paths_of_cells() -> dict[str, str]:
    """The file name under which each cell was compiled, by the cell's name."""
    named = {cell_of(path): path for path in list(linecache.cache)}
    named.pop("", None)
    return named
