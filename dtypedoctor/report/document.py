"""Documents: what is said and in which order, before a format draws it. Formats decide how it looks and nothing else.

A document is sections, a section is blocks, and what stands in a line are texts with a look. Texts may come from anywhere: each
format makes them safe for itself.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Look(StrEnum):
    """What a text is, so that a format can tell it apart."""

    PLAIN = "plain"
    NAME = "name"
    """A name or a message, shown letter by letter."""
    LINK = "link"
    STRONG = "strong"
    DIM = "dim"
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Words:
    """A text with a look."""

    text: str
    look: Look = Look.PLAIN


@dataclass(frozen=True, slots=True)
class Bar:
    """A magnitude on the scale of its dtype.

    Attributes:
        fill: from 0.0, the smallest normal value, to 1.0, the largest; None without such a scale.
        bad: whether something is wrong with it.
    """

    fill: float | None
    bad: bool = False


Inline = str | Words | Bar
Line = Inline | tuple[Inline, ...]
"""What stands in one line or in one cell."""


@dataclass(frozen=True, slots=True)
class Heading:
    """A small heading inside a section."""

    text: str


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Running text."""

    line: Line
    look: Look = Look.PLAIN


@dataclass(frozen=True, slots=True)
class Facts:
    """Labelled values."""

    rows: tuple[tuple[str, Line], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells, the first of which names the row; without a header where it is empty."""

    header: tuple[str, ...]
    rows: tuple[tuple[Line, ...], ...]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Items:
    """A list; the links of a chain lead from one to the next."""

    items: tuple[Line, ...]
    chain: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """A text to be copied as it is."""

    text: str
    language: str = ""


@dataclass(frozen=True, slots=True)
class Fold:
    """Blocks that are folded away under a title.

    Attributes:
        brief: what stands for them where nothing can be folded away, nothing at all if empty; None: they are shown.
    """

    title: Line
    blocks: tuple["Block", ...]
    brief: str | None = None


@dataclass(frozen=True, slots=True)
class Beside:
    """Two columns; one below the other where there is no room."""

    left: tuple["Block", ...]
    right: tuple["Block", ...]


Block = Heading | Paragraph | Facts | Table | Items | Code | Fold | Beside


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a document.

    Attributes:
        title: its heading; empty for what stands directly below the headline.
        anchor: its name within the document, unique.
        short: its title where space is short; the title itself if empty.
    """

    title: str
    blocks: tuple[Block, ...]
    anchor: str = ""
    short: str = ""


class Outcome(StrEnum):
    """What came of a check."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Something that a CI gates on.

    Attributes:
        kind: what class of failure it is, e.g. the id of a finding.
        message: one line; ``text`` is the whole.
        seconds: how long it took.
    """

    name: str
    outcome: Outcome
    kind: str = ""
    message: str = ""
    text: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What is said, in order.

    Attributes:
        name: what it is about, in a word.
        headline: the answer in a sentence; empty where there is no question.
        status: the word in capitals before the headline; may be empty.
        good: whether nothing is wrong; None where that is not the question.
        about: one line below the headline.
        labels: what a format with room for badges shows beside the status.
        checks: what a CI gates on.
        parts: the documents that this one sums up.
        next_command: what to type next; ``next_title`` stands above it.
        last_line: what else could be done, in a sentence; may be empty.
        data: makes what programs read, e.g. ``report.json``.
    """

    name: str
    sections: tuple[Section, ...]
    data: Callable[[], Mapping[str, Any]]
    headline: str = ""
    status: str = ""
    good: bool | None = None
    about: str = ""
    labels: tuple[Words, ...] = ()
    checks: tuple[Check, ...] = ()
    parts: tuple["Document", ...] = ()
    next_command: str = ""
    next_title: str = "Next"
    last_line: str = ""

    @property
    def title(self) -> str:
        """Status and headline."""
        return f"{self.status}: {self.headline}" if self.status else self.headline


def named(text: str) -> Words:
    """A text that is shown letter by letter."""
    return Words(text, Look.NAME)


def parts_of(line: Line) -> tuple[Inline, ...]:
    """What a line is made of."""
    return line if isinstance(line, tuple) else (line,)


def shares(needs: Sequence[int], total: int) -> list[int]:
    """``total`` divided among ``needs``: small ones are met in full, large ones divide the rest evenly."""
    given = [0] * len(needs)
    left = max(0, total)
    for done, i in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        given[i] = min(needs[i], left // (len(needs) - done))
        left -= given[i]
    return given
