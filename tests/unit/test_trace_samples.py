"""What a damaged line of samples costs."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtypedoctor.trace.lines import EVENTS, seal
from dtypedoctor.trace.reader import read_trace, samples_of

MANY = 2_000


@pytest.mark.parametrize(
    "damaged",
    [
        ["s", 1, 1, 1, [[1, "2.0"]]],
        ["s", 1, 1.5, 1, [[1, 2.0]]],
        ["s", 1, 1, True, [[1, 2.0]]],
        ["s", -1, 1, 1, [[1, 2.0]]],
        ["s", 1, 1, 2**63, [[1, 2.0]]],
        ["s", 1, 1, 1, [[1, -2.0]]],
        ["s", 1, 1, 1, [[1, float("inf")]]],
        ["s", 1, 1, 1, [[1, 2.0, 3]]],
        ["s", 1, 1, 1, [[1, 2.0, 0, -3]]],
    ],
)
def test_a_damaged_line_is_never_taken_for_samples(damaged: list[Any]) -> None:
    """A number of the wrong type or size, a row of the wrong length."""
    with pytest.raises((ValueError, TypeError)):
        list(samples_of(damaged))


@settings(max_examples=10)
@given(bad=st.sets(st.integers(1, MANY), min_size=1, max_size=3))
def test_one_damaged_line_among_thousands_costs_only_itself(
    tmp_path_factory: pytest.TempPathFactory, bad: set[int]
) -> None:
    """The others are read, and the damage is reported by line number in order."""
    lines = [seal(json.dumps(["s", i, 1, 1, [[0, 1.5]]]).encode(), i) for i in range(1, MANY + 1)]
    for number in bad:
        lines[number - 1] = b'["s",1,2'
    place = {"e": "site", "id": 0, "root": 0, "fqn": "a", "cls": "A", "phase": "forward", "kind": "output", "index": "",
             "dtype": "float32", "shape": [1]}  # fmt: skip
    lines.append(seal(json.dumps(place).encode(), len(lines) + 1))
    directory = tmp_path_factory.mktemp("damaged")
    (directory / EVENTS).write_bytes(b"\n".join(lines) + b"\n")
    trace = read_trace(directory)
    assert [sample.n for sample in trace.samples] == [i for i in range(1, MANY + 1) if i not in bad]
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
