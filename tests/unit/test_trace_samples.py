"""Lines of samples are read many at a time; what comes out is what reading one after the other gives."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtypedoctor.trace.lines import EVENTS, seal
from dtypedoctor.trace.loader import BATCH, parse_line, parse_lines
from dtypedoctor.trace.reader import read_trace

ROW = st.one_of(
    st.tuples(st.integers(0, 9), st.floats(0, 65504.0)),
    st.tuples(st.integers(0, 9), st.floats(0, 65504.0), st.integers(0, 9), st.integers(0, 9)),
)
LINE = st.tuples(st.just("s"), st.integers(0, 10**9), st.integers(1, 99), st.integers(1, 99), st.lists(ROW, max_size=4))


def encode(line: object) -> bytes:
    """A line as the writer writes it."""
    return json.dumps(line, separators=(",", ":")).encode()


@given(lines=st.lists(LINE, max_size=20))
def test_many_lines_at_once_give_what_each_gives_alone(lines: list[tuple[object, ...]]) -> None:
    """The fast way and the plain way agree on every well-formed trace."""
    encoded = [encode(line) for line in lines]
    assert parse_lines(encoded) == [sample for line in encoded for sample in parse_line(json.loads(line))]


@pytest.mark.parametrize(
    "damaged",
    [
        [b'["s",1,1,1,[[1,2.0]', b'["s",2,1,1,[[1,2.0]]]'],
        [b'["s",1,1,1,[', b'["s",1,1,1,[[1,2.0]]]]]'],
        [b'["s",1,1,1,[[1,"2.0"]]]'],
        [b'["s",1,1.5,1,[[1,2.0]]]'],
    ],
)
def test_a_damaged_line_is_never_taken_for_samples(damaged: list[bytes]) -> None:
    """Not even where two torn lines would complete each other, or where a number is of the wrong type."""
    with pytest.raises((ValueError, TypeError)):
        parse_lines(damaged)


@settings(max_examples=30)
@given(bad=st.sets(st.integers(1, 3 * BATCH), min_size=1, max_size=3))
def test_one_damaged_line_among_thousands_costs_only_itself(
    tmp_path_factory: pytest.TempPathFactory, bad: set[int]
) -> None:
    """The other lines of its batch are read, and the damage is reported by line number in order."""
    lines = [seal(encode(["s", i, 1, 1, [[0, 1.5]]]), i) for i in range(1, 3 * BATCH + 1)]
    for number in bad:
        lines[number - 1] = b'["s",1,2'
    place = {"e": "site", "id": 0, "root": 0, "fqn": "a", "cls": "A", "phase": "forward", "kind": "output", "index": "",
             "dtype": "float32", "shape": [1]}  # fmt: skip
    lines.append(seal(encode(place), len(lines) + 1))
    directory = tmp_path_factory.mktemp("damaged")
    (directory / EVENTS).write_bytes(b"\n".join(lines) + b"\n")
    trace = read_trace(directory)
    assert [sample.n for sample in trace.samples] == [i for i in range(1, 3 * BATCH + 1) if i not in bad]
    assert trace.damage == (f"{len(bad)} unreadable line(s): {', '.join(map(str, sorted(bad)))}",)


def test_lines_that_are_no_object_are_damage(tmp_path: Path) -> None:
    """A number, a text or a list where a record should be is counted and passed over, in a file without seals too."""
    (tmp_path / EVENTS).write_text(
        '{"e":"header"}\n5\n"text"\n[1]\nnull\n{"e":"end","n":1,"outcome":"completed","steps_completed":1}\n'
    )
    trace = read_trace(tmp_path)
    assert trace.damage[1:] == ("4 unreadable line(s): 2, 3, 4, 5",)
    assert "no checksums" in trace.damage[0]
    assert trace.end is not None
