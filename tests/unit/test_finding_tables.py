"""The tables of findings in the documentation are those that the specs make."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from finding_tables import ROOT, tables

TABLES = [pytest.param(old, new, id=str(path.relative_to(ROOT))) for path, old, new in tables()]


@pytest.mark.parametrize(("old", "new"), TABLES)
def test_a_table_of_findings_is_not_stale(old: str, new: str) -> None:
    """Where it is, `python tools/finding_tables.py` writes it anew."""
    assert old == new, "run python tools/finding_tables.py"
