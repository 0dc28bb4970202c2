"""`docs/remedies.md` lists the remedies that there are, and says of each what the program says."""

import re
from pathlib import Path

import pytest

from dtypedoctor.diagnosis.registry import finding_ids, spec_of
from dtypedoctor.trials.remedies import remedies

PAGE = (Path(__file__).parents[2] / "docs" / "remedies.md").read_text(encoding="utf-8")
ROWS = {
    found[0]: dict(zip(("change", "for", "safe", "cost"), found[1:], strict=True))
    for found in re.findall(
        r"^\| `([\w-]+)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE.partition("## Where each")[0], re.MULTILINE
    )
}


def test_the_page_lists_exactly_the_remedies_that_exist() -> None:
    """In the order of the program, so that a new one is not forgotten."""
    assert list(ROWS) == list(remedies())


def test_a_row_says_what_the_remedy_changes_and_whether_it_is_safe(subtests: pytest.Subtests) -> None:
    """The sentence of the reports; and something about its cost."""
    for remedy in remedies().values():
        with subtests.test(remedy.id):
            row = ROWS[remedy.id]
            assert row["change"].lower() == remedy.summary.lower()
            assert row["safe"] == ("yes" if remedy.safe else "**no**")
            assert len(row["cost"]) > 3


def test_a_row_names_every_finding_that_proposes_the_remedy(subtests: pytest.Subtests) -> None:
    """And only findings that there are."""
    for remedy in remedies():
        with subtests.test(remedy):
            named = set(re.findall(r"\[`([\w-]+)`\]", ROWS[remedy]["for"]))
            proposing = {finding for finding in finding_ids() if remedy in spec_of(finding).proposed}
            assert proposing <= named <= set(finding_ids())


def test_the_page_says_when_to_prefer_which() -> None:
    """In the words of the reports, and of every remedy that has such words."""
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert dict(rows) == {remedy.id: remedy.prefer for remedy in remedies().values() if remedy.prefer}


def test_every_cost_that_was_measured_is_that_of_a_remedy() -> None:
    """The table is printed by a benchmark; a remedy that is gone or renamed must not stay in it."""
    rows = re.findall(
        r"^\| `([\w-]+)` \| ([\d.]+)× \([^|]+\) \| ([\d.]+)× \([^|]+\) \| the [^|]+ \|$", PAGE, re.MULTILINE
    )
    assert {remedy for remedy, _, _ in rows} <= set(remedies())
    assert len(rows) > 10
