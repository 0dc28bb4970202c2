"""The tables of findings in the documentation are those that the specs make."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from finding_tables import NOT_COVERED, ROOT, TRIED, items, tables

from dtypedoctor.diagnosis import finding_ids
from dtypedoctor.report.to_json import json_schema

TABLES = [pytest.param(old, new, id=str(path.relative_to(ROOT))) for path, old, new in tables()]


@pytest.mark.parametrize(("old", "new"), TABLES)
def test_a_table_of_findings_is_not_stale(old: str, new: str) -> None:
    """Where it is, `python tools/finding_tables.py` writes it anew."""
    assert old == new, "run python tools/finding_tables.py"


VERBS = {"audit", "verify", "parity"}


def test_an_item_is_public_once_and_what_covers_it_exists() -> None:
    known = items()
    assert len({item["item"].lower() for item in known}) == len(known)
    assert all(re.fullmatch(r"[\w.-]+#\d+", item["item"]) for item in known)
    assert {item["tried"] for item in known} <= set(TRIED)
    sections = set(json_schema()["properties"])  # of a report
    assert {item["covered by"] for item in known} <= {NOT_COVERED} | VERBS | sections | set(finding_ids())


def test_what_is_right_is_covered_and_each_ticket_of_the_page_is_an_item() -> None:
    known = {item["item"]: item for item in items()}
    assert all(item["covered by"] != NOT_COVERED for item in known.values() if item["tried"] == "right")
    page = (ROOT / "docs" / "known-failures.md").read_text(encoding="utf-8")
    tickets = {
        ticket
        for row in re.findall(r"^\| .+$", page, re.MULTILINE)
        for ticket in re.findall(r"[A-Za-z][\w.-]*#\d+", row)
    }
    assert tickets - known.keys() == set()
