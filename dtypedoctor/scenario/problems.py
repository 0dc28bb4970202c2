"""What is wrong with a file, and where."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dtypedoctor.errors import UsageError

__all__ = ["KeyPath", "Place", "Problem", "dotted", "lines_of", "printable", "quoted", "refusal"]

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a file down to a value."""

_MOST_SHOWN = 100
_LONGEST_QUOTE = 60
_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # those at which PyYAML counts a new line


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A position in a text. Line and column count from 1, the column in characters."""

    line: int
    column: int

    @classmethod
    def after(cls, text: str) -> Self:
        """The place of the character that follows ``text``."""
        lines = lines_of(text)
        return cls(len(lines), len(lines[-1]) + 1)

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One mistake: its place and what is wrong, in plain words on one line."""

    place: Place
    text: str


def lines_of(text: str) -> list[str]:
    """The text's lines as YAML counts them; one empty line for an empty text."""
    return _LINE_BREAK.split(text)


def dotted(path: KeyPath) -> str:
    """The path as a person writes it: ``("steps", 0, "model")`` is ``steps[0].model``; empty for the whole file."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (
                part if part.isidentifier() and len(part) <= _LONGEST_QUOTE else quoted(part)
            )
    return text


def quoted(text: str, limit: int = _LONGEST_QUOTE) -> str:
    """The text in quotes on one line, escaped where it does not print and shortened to ``limit`` characters."""
    return repr(text if len(text) <= limit else text[:limit] + "…")


def printable(text: str | Path) -> str:
    """The text or path with whatever does not print (line breaks, undecodable bytes of a file name) escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def refusal(path: Path, problems: Iterable[Problem], hint: str) -> UsageError:
    """One error that names all problems in the order of their places, one ``file:line:column: text`` a line.

    After the first 100 only the number of the others is said.
    """
    ordered = sorted(set(problems))
    lines = [f"{printable(path)}:{problem.place}: {problem.text}" for problem in ordered[:_MOST_SHOWN]]
    if len(ordered) > _MOST_SHOWN:
        lines.append(f"{printable(path)}: and {len(ordered) - _MOST_SHOWN} more mistakes")
    return UsageError("\n".join(lines), hint)
