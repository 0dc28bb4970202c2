"""`docs/remedies.md` lists every fix, and `docs/measurements/fixes.md` has the costs of fixes that exist; `test_finding_tables.py` holds the tables' words."""

import re
from pathlib import Path

from dtypedoctor.examination.fixes import remedies

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_lists_every_fix_once() -> None:
    """In one of its three groups."""
    text = (DOCS / "remedies.md").read_text(encoding="utf-8").partition("### Of a script or model")[2]
    rows = re.findall(r"^\| `([\w-]+)`", text, re.MULTILINE)
    scenarios = re.findall(r"`([\w-]+)`", text.partition("### Of the built-in scenarios")[2].partition("<!--")[0])
    assert sorted(rows + scenarios) == sorted(remedies())


def test_every_cost_that_was_measured_is_that_of_a_fix() -> None:
    """A fix that is gone or renamed must not stay in the table."""
    text = (DOCS / "measurements" / "fixes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| [\d.]+× \([^|]+\) \| [\d.]+× ", text, re.MULTILINE)
    assert set(rows) <= set(remedies())
    assert len(rows) > 10
