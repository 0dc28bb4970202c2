"""Texts, numbers and scales as every format shows them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtypedoctor.report.document import Line, Table, Words, parts_of
from dtypedoctor.report.run_document import magnitude_section
from dtypedoctor.report.to_json import Report, Status, StripRow
from dtypedoctor.text import (
    ascii_only,
    breaks,
    clipped,
    count,
    duration,
    fill,
    memory,
    number,
    one_line,
    paragraphs,
    ratio,
    series,
    span,
)


@given(st.text(), st.integers(10, 300))
def test_a_line_is_printable_and_short(text: str, limit: int) -> None:
    """Whatever comes in, one visible line of bounded length comes out."""
    line = one_line(text, limit)
    assert line.isprintable()
    assert len(line) <= limit


def test_what_cannot_be_seen_is_written_as_an_escape() -> None:
    """A bidi override, an escape sequence and a zero-width space cannot hide."""
    assert one_line("a\u202eb\x1b[0m\u200bc") == "a\\u202eb\\x1b[0m\\u200bc"
    assert one_line("two\r\nlines\tand\xa0spaces") == "two lines and spaces"


def test_a_long_name_keeps_both_ends() -> None:
    """The end of a dotted name says most, its beginning which model it is."""
    name = "model." + "x" * 300 + ".down_proj"
    assert one_line(name, 30).startswith("model.xx")
    assert one_line(name, 30).endswith(".down_proj")
    assert len(one_line(name, 30)) == 30


@pytest.mark.parametrize("limit", range(20, 60, 3))
def test_a_sentence_loses_whole_words(limit: int) -> None:
    """What is left out is shown between two words; a name in the middle of which the cut falls goes as a whole."""
    sentence = "operators of layers.0.self_attn are not cast by the float16 autocast region around it"
    cut = one_line(sentence, limit)
    assert len(cut) <= limit
    head, tail = cut.split("…")
    assert sentence.startswith((f"{head} ", head.rstrip() + " "))
    assert sentence.endswith((f" {tail}", " " + tail.lstrip()))


@pytest.mark.parametrize("limit", range(26, 60, 3))
def test_no_sentence_is_turned_into_its_opposite(limit: int) -> None:
    """A *not* in the middle is not left out between two words that stay: the end goes."""
    sentence = "aten.addmm_.default is not cast by the float16 autocast region around it, and so it raises."
    cut = clipped(sentence, limit)
    assert len(cut) <= limit
    assert cut.endswith(" …")
    assert f"{sentence} ".startswith(cut.removesuffix("…"))
    assert clipped(sentence, 200) == sentence
    assert clipped("a\u202eb", limit) == "a\\u202eb"


def test_paragraphs_keep_their_lines_and_say_what_is_cut() -> None:
    """A traceback stays readable; an endless one says how much is missing."""
    assert paragraphs("File\n\tx = 1\x07") == "File\n    x = 1\\x07"
    assert paragraphs("a" * 30, 10) == "aaaaaaaaaa… (20 characters left out)"


def test_a_cell_is_folded_after_hyphens() -> None:
    """Ids break where a reader expects it."""

    def fold(text: str, width: int) -> str:
        starts = [0, *breaks(text, width), len(text)]
        return "\n".join(text[a:b].rstrip() for a, b in pairwise(starts))

    assert fold("gemma4-mlp-float32-product", 12) == "gemma4-mlp-\nfloat32-\nproduct"
    assert fold("in step 2 (generate)", 10) == "in step 2\n(generate)"
    assert fold("layers.0.pre_feedforward_layernorm", 20) == "layers.0.pre_\nfeedforward_\nlayernorm"
    assert fold("at a/long/path.py:12", 10) == "at a/long/\npath.py:12"


@given(st.text())
def test_ascii_text_is_ascii(text: str) -> None:
    """Everything has an ASCII form."""
    assert ascii_only(text).isascii()


@pytest.mark.parametrize(
    ("value", "expected"),
    [(65504.0, "65,504"), (77178.09375, "77,178"), (0.0, "0"), (6.104e-05, "6.104e-5"), (3.3895e38, "3.389e38"),
     (None, "–"), (float("nan"), "NaN"), (float("inf"), "inf"), (1234.5678, "1235")],
)  # fmt: skip
def test_numbers_are_shown_with_four_digits(value: float | None, expected: str) -> None:
    """Four digits, the limit of float16 in full, and a dash for what is missing."""
    assert number(value) == expected


def test_quantities_carry_their_units() -> None:
    """Times, sizes, factors and counts read without a legend."""
    assert [duration(v) for v in (0.0123, 2.5, None)] == ["12.3 ms", "2.5 s", "–"]
    assert [memory(v) for v in (512, 1_048_576, 85 * 2**30, 3 * 2**40, None)] == [
        "512 B",
        "1 MiB",
        "85 GiB",
        "3 TiB",
        "–",
    ]
    assert memory(1023 * 1024) == "1023 KiB"
    assert (ratio(1.034), ratio(None), count(1234567), count(None)) == ("1.03×", "–", "1,234,567", "–")
    assert (span((2.5, None, 1.25)), span((2.5,)), span(())) == ("2.5 → 1.25", "2.5", "–")


def test_a_long_series_loses_its_middle() -> None:
    """The first and the last steps are shown, with the number of all."""
    assert series([1.0, None, 3.0]) == "1 – 3"
    assert series([float(i) for i in range(100)], 6) == "0 1 2 3 … 98 99 (100 steps)"


@given(st.floats(0, 65504.0), st.floats(0, 65504.0))
def test_the_scale_is_monotonic_between_nothing_and_the_largest_value(one: float, other: float) -> None:
    """A larger magnitude never stands lower, and float16's largest stands at the top."""
    first, second = fill(min(one, other), "float16"), fill(max(one, other), "float16")
    assert first is not None
    assert second is not None
    assert 0.0 <= first <= second <= 1.0
    assert fill(65504.0, "float16") == 1.0
    assert fill(2.0**-14, "float16") == 0.0
    assert fill(1.0, "int64") is None
    assert fill(None, "float16") is None


def row(fqn: str, **more: object) -> StripRow:
    values: dict[str, object] = {"cls": "Linear", "dtype": "float16", "absmax": 1.0, "num_nan": 0, "num_inf": 0,
                                 "headroom": None, "is_origin": False}  # fmt: skip
    return StripRow(fqn=fqn, **(values | more))  # type: ignore[arg-type]


def strip(*rows: StripRow) -> tuple[tuple[Line, ...], ...]:
    table = magnitude_section(Report(name="x", status=Status.FINDINGS, headline="", strip=rows)).blocks[0]
    assert isinstance(table, Table)
    return table.rows


def names(*fqns: str) -> list[str]:
    """The modules as the table names them."""
    words = (parts_of(cells[1])[0] for cells in strip(*map(row, fqns)))
    return [word.text for word in words if isinstance(word, Words)]
