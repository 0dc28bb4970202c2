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

_HEADER = ("scenario", "untreated", "finding", "cured by", "not cured by", "as it says")
_SHARES = (0.2, 0.19, 0.18, 0.18, 0.18, 0.07)
"""Columns' shares of the width."""


def render_matrix(rows: Sequence[MatrixRow], console: Console) -> None:
    """Prints one line of cells per scenario, what the signs mean, and each proven cause in a sentence."""
    table = Table(box=None, padding=(0, 2, 1, 0), pad_edge=False)
    for title in _HEADER:
        table.add_column(title, overflow="fold", header_style="dim")
    widths = [max(8, int(console.width * share) - 2) for share in _SHARES]
    plain = console.options.ascii_only
    for row in rows:
        style = "" if row.as_expected else "bold red"
        table.add_row(*(_cell(text, width, style, plain) for text, width in zip(_cells(row), widths, strict=True)))
    console.print(table, highlight=False)
    for line in _footer(rows):
        console.print(
            Padding(_cell(line, console.width - 2, "dim", plain), (0, 0, 0, 2), expand=False), highlight=False
        )


def _cell(text: str, width: int, style: str, plain: bool) -> Text:
    folded = "\n".join(fold(one_line(line, 600), width) for line in text.split("\n"))
    return Text(ascii_only(folded) if plain else folded, style=style)


def _cells(row: MatrixRow) -> tuple[str, ...]:
    return (
        row.scenario,
        _untreated(row),
        _finding(row),
        _listed(row, row.cured_by),
        _listed(row, row.not_cured_by),
        "yes" if row.as_expected else "NO",
    )


def _untreated(row: MatrixRow) -> str:
    if row.status == "refused":
        return f"refused: {one_line(row.cause, 80)}"
    if row.before != "completed":
        return one_line(row.before, 90)
    wrong = row.output_error is not None and row.finding is not None
    return f"completes, output error {number(row.output_error)}" if wrong else "completes"


def _finding(row: MatrixRow) -> str:
    if row.finding is None:
        return "none"
    sure = "proven" if row.proven else f"{row.confidence}, not proven"
    return f"{row.finding} ({sure}{f', {row.phase}' if row.phase else ''})"


def _listed(row: MatrixRow, remedies: Sequence[str]) -> str:
    return "\n".join(f"{name}*" if name in row.unsafe else name for name in remedies) or ABSENT


def _footer(rows: Sequence[MatrixRow]) -> Iterator[str]:
    met = sum(row.as_expected for row in rows)
    total = duration(sum(row.seconds for row in rows))
    yield f"{met} of {len(rows)} scenarios are as they say, in {total}."
    if any(row.unsafe for row in rows):
        yield "* unsafe: it casts what disagrees without a word, so it may hide a failure instead of curing it."
    for row in rows:
        if row.finding is not None:
            yield f"{row.scenario}: {row.cause}"
