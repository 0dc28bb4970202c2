"""The report at the prompt."""

import io
import re

import pytest
from goldens import assert_golden
from report_builders import everything, healthy, hostile, mismatch, overflow, worker_died
from rich.cells import cell_len
from rich.console import Console

from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.to_json import Report
from dtypedoctor.report.to_terminal import print_document


def shown(
    report: Report, *, width: int = 80, encoding: str = "utf-8", terminal: bool = False, no_color: bool = False
) -> str:
    """What a console of the given kind receives."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, force_terminal=terminal, no_color=no_color, legacy_windows=False)
    print_document(run_document(report), console)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("report", [healthy(), overflow(), mismatch(), worker_died()], ids=lambda report: report.name)
def test_eighty_columns_show_what_is_expected(report: Report) -> None:
    """The whole page, as a person with a narrow terminal sees it."""
    text = "\n".join(line.rstrip() for line in shown(report).splitlines()) + "\n"
    assert_golden(f"{report.name}.terminal.txt", text)


@pytest.mark.parametrize("width", [80, 100, 132, 200])
@pytest.mark.parametrize("report", everything(), ids=["healthy", "overflow", "mismatch", "worker-died", "hostile"])
def test_no_line_is_wider_than_the_terminal(report: Report, width: int) -> None:
    """A terminal that breaks lines itself would tear the tables."""
    assert max(cell_len(line) for line in shown(report, width=width).splitlines()) <= width


def test_piped_output_has_no_escape_sequences() -> None:
    """A file or a pipe receives plain text."""
    assert "\x1b" not in shown(overflow())


def test_no_color_leaves_out_every_colour() -> None:
    """With NO_COLOR only weight and underline are left."""
    codes = re.findall(r"\x1b\[([\d;]*)m", shown(overflow(), terminal=True, no_color=True))
    assert codes
    assert not [
        code for code in codes for part in code.split(";") if part.startswith(("3", "4", "9")) and len(part) > 1
    ]


@pytest.mark.parametrize("report", everything(), ids=["healthy", "overflow", "mismatch", "worker-died", "hostile"])
def test_a_terminal_without_unicode_gets_ascii(report: Report) -> None:
    """Arrows, dashes and bars have ASCII stand-ins where the encoding has nothing better."""
    assert shown(report, encoding="ascii").isascii()


def test_hostile_names_reach_the_terminal_as_visible_text() -> None:
    """No name moves the cursor, changes colours or turns the reading direction."""
    text = shown(hostile())
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    assert "\\x1b[31m" in text
    assert "\\u202e" in text
