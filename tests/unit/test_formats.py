"""The command line names the formats that there are, although it imports no renderer to do so."""

from collections.abc import Iterable
from enum import StrEnum

import pytest

from dtypedoctor.cli import compare, env, report, run
from dtypedoctor.report.compare_formats import COMPARISON_RENDERERS
from dtypedoctor.report.environment_formats import ENVIRONMENT_RENDERERS
from dtypedoctor.report.renderers import MERGED, RENDERERS

VERBS = {
    "compare": (compare.Format, COMPARISON_RENDERERS),
    "env": (env.Format, ENVIRONMENT_RENDERERS),
    "report": (report.Format, RENDERERS),
    "run": (run.Format, MERGED),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_offers_the_terminal_and_every_renderer(verb: str) -> None:
    """A renderer that is listed and cannot be asked for would be found by nobody."""
    offered: type[StrEnum]
    renderers: Iterable[str]
    offered, renderers = VERBS[verb]
    assert [style.value for style in offered] == ["terminal", *renderers]


def test_what_several_reports_can_be_one_report_can_be_too() -> None:
    """A merged format is one of the formats."""
    assert set(MERGED) <= set(RENDERERS)
