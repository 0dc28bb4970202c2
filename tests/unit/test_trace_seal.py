"""Seals tell what has happened to the lines of a file."""

import json

from hypothesis import given
from hypothesis import strategies as st
from sealed import sealed_bodies

from dtypedoctor.trace.lines import open_lines, seal

BODIES = [
    json.dumps(value, separators=(",", ":")).encode()
    for value in ({"e": "x", "n": 1}, ["s", 1, 2], {"a": {"b": []}}, [0], {"z": "é"})
]


def lines() -> list[bytes]:
    return sealed_bodies(BODIES).splitlines(keepends=True)


def test_a_sealed_line_is_still_json() -> None:
    """Any reader of JSON Lines can read a trace."""
    assert [type(json.loads(line)) for line in lines()] == [dict, list, dict, list, dict]
    assert json.loads(seal(b'{"a":1}', 3)).keys() == {"a", "~"}


@given(order=st.permutations(range(len(BODIES))))
def test_moved_lines_are_put_back_in_order(order: list[int]) -> None:
    """Nothing is lost, so nothing is damaged."""
    opened = open_lines(b"".join(lines()[place] for place in order))
    assert [body for _, body in opened.lines] == BODIES
    assert list(opened.damage()) == []


@given(times=st.lists(st.integers(1, 3), min_size=len(BODIES), max_size=len(BODIES)))
def test_doubled_lines_are_read_once(times: list[int]) -> None:
    """And counted."""
    opened = open_lines(b"".join(line * count for line, count in zip(lines(), times, strict=True)))
    assert [body for _, body in opened.lines] == BODIES
    assert opened.doubled == sum(times) - len(BODIES)


@given(place=st.integers(0, len(BODIES) - 1), at=st.integers(0, 200), bit=st.integers(0, 7))
def test_a_changed_line_is_never_taken_for_another(place: int, at: int, bit: int) -> None:
    """One bit of a line: it is left out or, where only its punctuation has changed, read as it was."""
    changed = [bytearray(line) for line in lines()]
    changed[place][at % (len(changed[place]) - 1)] ^= 1 << bit
    opened = open_lines(b"".join(map(bytes, changed)))
    assert {body for _, body in opened.lines} <= set(BODIES)
    assert len(opened.lines) >= len(BODIES) - 1


def test_a_file_without_seals_is_read_and_said_to_have_none() -> None:
    """A changed record would not be noticed in it."""
    opened = open_lines(b"".join(body + b"\n" for body in BODIES))
    assert [body for _, body in opened.lines] == BODIES
    assert "no checksums" in " ".join(opened.damage())
