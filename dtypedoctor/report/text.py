"""Makes names and messages that come from elsewhere safe to show: nothing invisible, nothing that reorders, nothing endless."""

import re

__all__ = ["ascii_only", "fold", "one_line", "paragraphs"]

NAME_LIMIT = 200
TEXT_LIMIT = 2000

_ASCII = str.maketrans({
    "→": "->", "←": "<-", "×": "x", "…": "...", "–": "-", "—": "-", "≤": "<=", "≥": ">=", "±": "+/-", "≈": "~", "·": "*",
    "“": '"', "”": '"', "‘": "'", "’": "'", "µ": "u", "−": "-", "∞": "inf", "█": "#", "░": ".", "▶": ">", "✔": "+", "✘": "x",
})  # fmt: skip


def one_line(text: str, limit: int = NAME_LIMIT) -> str:
    """``text`` on one line, with whatever cannot be seen written as an escape (``\\x1b``, ``\\u202e``).

    Line breaks, tabs and unusual spaces become single spaces. What is longer than ``limit`` characters loses its middle,
    because the end of a dotted name says most.
    """
    if not text.isprintable():
        text = _escape(" ".join(text[: 4 * limit + TEXT_LIMIT].split()))
    if len(text) <= limit:
        return text
    return text[: limit // 2] + "…" + text[len(text) - (limit - limit // 2 - 1) :]


def paragraphs(text: str, limit: int = TEXT_LIMIT) -> str:
    """Like :func:`one_line`, but line breaks stay, a tab becomes four spaces, and what is too long loses its end."""
    shown = "\n".join(_escape(line.replace("\t", "    ")) for line in text[:limit].splitlines())
    left_out = len(text) - limit
    return f"{shown}… ({left_out:,} characters left out)" if left_out > 0 else shown


def fold(text: str, width: int) -> str:
    """``text`` broken into lines of at most ``width`` characters at spaces and after hyphens (longer words stay whole)."""
    lines = [""]
    for piece in re.findall(r"[^\s-]*-|[^\s-]+|\s+", text):
        if lines[-1].strip() and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece if lines[-1] else piece.lstrip()
    return "\n".join(line.rstrip() for line in lines)


def ascii_only(text: str) -> str:
    """``text`` for a terminal that knows no more than ASCII: signs spelt out, other characters as escapes."""
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")


def _escape(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else " " if c.isspace() and c.isascii() else _code(c) for c in line)


def _code(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
