"""Excerpts of source: how they are drawn, with a caret under what failed."""

from dtypedoctor.diagnosis.rule import Excerpt
from dtypedoctor.report.document import Code
from dtypedoctor.report.run_facts import where_it_shows

OWN = Excerpt(file="train.py", line=9, function="forward", text="    return self.head(x)", begin=11, end=23)
INSIDE = Excerpt(
    file="torch/nn/modules/linear.py", line=134, function="forward", text="    return F.linear(x)", begin=11, end=22, skipped=2
)  # fmt: skip


def test_the_caret_stands_under_what_failed() -> None:
    """The program's own line, how many frames lie between, the library's line."""
    _, code = where_it_shows((OWN, INSIDE))
    assert isinstance(code, Code)
    assert code.text.splitlines() == [
        " --> train.py:9 in forward",
        "  |",
        "9 |     return self.head(x)",
        "  |            ^^^^^^^^^^^^",
        "    … 2 frames",
        "   --> torch/nn/modules/linear.py:134 in forward",
        "    |",
        "134 |     return F.linear(x)",
        "    |            ^^^^^^^^^^^",
    ]


def test_without_an_excerpt_nothing_is_shown() -> None:
    """An older report, or a trace of somebody else's."""
    assert where_it_shows(()) == ()
