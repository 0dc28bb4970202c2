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
from dtypedoctor.text import words


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


def parts_of_words(text: str) -> set[str]:
    """The words of a text, and what is left of each where a line may be broken inside of it."""
    found = set()
    for word in text.split():
        pieces = words(word, parts=True)
        found |= {"".join(pieces[i:j]) for i in range(len(pieces)) for j in range(i + 1, len(pieces) + 1)}
    return found


@pytest.mark.parametrize("width", [40, 60, 100, 200])
@pytest.mark.parametrize("report", [healthy(), overflow(), mismatch(), worker_died()], ids=lambda report: report.name)
def test_names_are_broken_at_their_joints_only(report: Report, width: int) -> None:
    """At every width names are broken behind dots, dashes, slashes and underscores only, and bars are whole."""
    known = parts_of_words(shown(report, width=10_000))
    broken = [
        word for word in shown(report, width=width).split() if word not in known and not re.fullmatch("[|].+[|]", word)
    ]
    assert broken == []


def test_a_table_that_does_not_fit_has_a_row_below_the_other() -> None:
    """At 40 columns a module stands above its values, the origin with its mark."""
    lines = [line.strip() for line in shown(overflow(), width=40).splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("▶"))
    assert lines[at] == "▶ layers.0.mlp (Gemma4TextMLP)"
    assert lines[at + 1].split() == ["dtype", "f16"]
    assert any(re.fullmatch(r"in its range +\|█{6}\|", line) for line in lines[at : at + 6])


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


def test_colour_adds_nothing_to_the_meaning() -> None:
    """The text with colour is the text without it, which ends no line in spaces; the origin and each outcome are words."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown(overflow(), terminal=True))
    assert "\n".join(line.rstrip() for line in plain.split("\n")) == shown(overflow())
    (origin,) = [line for line in plain.splitlines() if "ORIGIN" in line]
    assert origin.lstrip().startswith("▶")
    assert re.search(r"mlp-clamp\n +what it changes .*\n +outcome +not tried: ", plain)


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
