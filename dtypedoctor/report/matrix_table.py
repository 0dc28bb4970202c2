"""The matrix for a person at the prompt."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dtypedoctor.report.matrix import MatrixRow
from dtypedoctor.report.numbers import ABSENT, duration, number
from dtypedoctor.report.text import ascii_only, fold, one_line

__all__ = ["render_matrix"]

_HEADER = ("scenario", "before", "finding", "after", "as it says")
_SHARES = (0.37, 0.24, 0.18, 0.09, 0.12)
"""Columns' shares of the width."""


def render_matrix(rows: Sequence[MatrixRow], console: Console) -> None:
    """Prints the matrix, then for each finding its cause and the remedies that cure and that do not."""
    plain = console.options.ascii_only

    def text(words: str, width: int, style: str = "") -> Text:
        folded = fold(one_line(words, 600), width)
        return Text(ascii_only(folded) if plain else folded, style=style)

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    widths = [max(8, int(console.width * share) - 2) for share in _SHARES]
    for title, width in zip(_HEADER, widths, strict=True):
        table.add_column(title, overflow="fold", header_style="dim", min_width=width)
    for row in rows:
        style = "" if row.as_expected else "bold red"
        table.add_row(*(text(words, width, style) for words, width in zip(_cells(row), widths, strict=True)))
    console.print(table, highlight=False)
    for row in rows:
        for indent, words, style in _details(row):
            console.print(Padding(text(words, console.width - indent, style), (0, 0, 0, indent)), highlight=False)
    console.print()
    for line in _footer(rows):
        console.print(text(line, console.width, "dim"), highlight=False)


def _cells(row: MatrixRow) -> tuple[str, ...]:
    return (
        row.scenario,
        _before(row),
        f"{row.finding}, {'proven' if row.proven else row.confidence}" if row.finding else "none",
        ("cured" if row.cured_by else "not cured") if row.finding else ABSENT,
        "yes" if row.as_expected else "NO",
    )


def _before(row: MatrixRow) -> str:
    if row.status == "refused":
        return "refused"
    if row.before != "completed":
        return row.before.split(":")[0]
    if row.finding is not None and row.output_error is not None:
        return f"completes, output error {number(row.output_error)}"
    return "completes"


def _details(row: MatrixRow) -> Iterator[tuple[int, str, str]]:
    """Indentation, words and style of the lines about one row; none for a healthy one."""
    if row.finding is None and row.as_expected:
        return
    yield 0, "", ""
    yield 0, row.scenario, "bold"
    yield 2, row.cause, ""
    for title, remedies in (
        ("cured by", row.cured_by),
        ("not cured by", row.not_cured_by),
        ("not tried", row.not_tried),
    ):
        if remedies:
            yield 2, f"{title}: {', '.join(f'{name}*' if name in row.unsafe else name for name in remedies)}", ""


def _footer(rows: Sequence[MatrixRow]) -> Iterator[str]:
    met = sum(row.as_expected for row in rows)
    yield f"{met} of {len(rows)} scenarios are as they say, in {duration(sum(row.seconds for row in rows))}."
    if any(row.unsafe for row in rows):
        yield "* unsafe: it casts what disagrees without a word, so it may hide a failure instead of curing it."
