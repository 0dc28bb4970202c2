"""The figures of docs/architecture.md are counted, and none gets worse than the page says."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from figures import PAGE, ROOT, Code, documented, figures

CODE = Code(ROOT)


def test_no_figure_is_worse_than_the_page_says() -> None:
    """What the page states is a ceiling, to the last line; after a change that makes one better: `python tools/figures.py --write`."""
    counts = figures(CODE)
    rows = documented(PAGE.read_text(encoding="utf-8"))
    assert [row.name for row in rows] == list(counts)
    worse = {row.name: (counts[row.name], row.now) for row in rows if counts[row.name] > row.now}
    assert not worse, f"(counted, documented): {worse}; see python tools/figures.py"


def test_each_place_that_catches_everything_says_why() -> None:
    """What catches every exception keeps some that mean the program: a comment stands on its line."""
    lines = {name: text.splitlines() for name, text in CODE.texts.items()}
    bare = [
        place
        for place in CODE.broad_excepts()
        if "# " not in lines[place.rpartition(":")[0]][int(place.rpartition(":")[2]) - 1]
    ]
    assert not bare
