"""What a process writes is kept in a file of bounded size: its beginning, its end, and how much lies between."""

import random
import re
from pathlib import Path

import pytest

from dtypedoctor.runner.streams import KeptOutput

LEFT_OUT = re.compile(rb"\n\[dtypedoctor: ([0-9,]+) bytes of output are left out here\]\n")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> type[KeptOutput]:
    """One that keeps 100 bytes of the beginning and at least 200 of the end."""
    monkeypatch.setattr(KeptOutput, "head", 100)
    monkeypatch.setattr(KeptOutput, "tail", 200)
    return KeptOutput


@pytest.mark.parametrize("length", [0, 1, 99, 100, 101, 499, 500, 501, 700, 701, 5_000, 100_000])
@pytest.mark.parametrize("largest", [1, 7, 300, 65_536])
def test_beginning_end_and_number_are_right_at_any_moment(
    length: int, largest: int, small: type[KeptOutput], tmp_path: Path
) -> None:
    """Whatever pieces it comes in, and whenever somebody looks; nothing is buffered."""
    draw = random.Random(length * largest)
    data = draw.randbytes(length).replace(b"[", b"(")
    kept, written = small(tmp_path / "stdout.txt"), 0
    while written < length:
        piece = draw.randint(1, largest)
        kept.write(data[written : written + piece])
        written = min(written + piece, length)
        if largest > 1 or written == length:
            found = (tmp_path / "stdout.txt").read_bytes()
            assert len(found) < 100 + 2 * 200 + 100
            gap = LEFT_OUT.search(found)
            whole = (
                found
                if gap is None
                else found[: gap.start()] + data[100 : 100 + int(gap[1].replace(b",", b""))] + found[gap.end() :]
            )
            assert whole == data[:written]
            assert gap is None or (gap.start() == 100 and len(found) - gap.end() >= 200)
    kept.close()


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    """Whoever made it keeps it."""
    (tmp_path / "stdout.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        KeptOutput(tmp_path / "stdout.txt")
    assert (tmp_path / "stdout.txt").read_text() == "mine"
