"""The page about known failures tells the truth: what it names exists and leads to the finding of its row."""

import re
from pathlib import Path

import pytest
from script_corpus import cases

from dtypedoctor.lab.scenarios.loading import load_scenario, resolve

PAGE = (Path(__file__).parents[2] / "docs" / "known-failures.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| .+ \| `([a-z0-9-]+)` \| (.+) \|$", PAGE, re.MULTILINE)
SCRIPTS = {case.name: case for case in cases()}


def test_there_is_a_row_for_every_finding_that_scripts_can_show() -> None:
    """What no script shows (it needs a GPU, or a correction that was asked for) is on the findings' own pages."""
    assert {finding for finding, _ in ROWS} == {case.ids[0] for case in cases() if case.ids}


def test_each_proof_leads_to_the_finding_of_its_row(subtests: pytest.Subtests) -> None:
    """Scripts by their headers, which other tests hold the diagnosis to; scenarios by what they say they show."""
    for finding, proofs in ROWS:
        with subtests.test(finding):
            names = re.findall(r"`([A-Za-z0-9_-]+)`", proofs)
            assert names
            for name in names:
                if name in SCRIPTS:
                    assert finding in SCRIPTS[name].ids
                else:
                    assert finding in load_scenario(resolve(name)).expect.findings
