"""The page about scripts of one's own: its script fails as the page says."""

import re
from pathlib import Path

import pytest
from command import forked as dtypedoctor
from command import report_of
from documented import ROOT

PAGE = ROOT / "docs" / "your-own-script.md"
SCRIPT = re.compile(r"^<!-- train.py -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def without_numbers(text: str) -> str:
    """On one line; magnitudes may differ in their last digits from one kind of processor to the next."""
    return re.sub(r"reaches [\d.,e]*\d", "reaches", " ".join(text.split()))


@pytest.mark.release
def test_the_pages_script_gives_the_verdict_that_is_shown(tmp_path: Path) -> None:
    """As the page has it typed."""
    page = PAGE.read_text(encoding="utf-8")
    script, shown = SCRIPT.search(page), SHOWN.search(page)
    assert script is not None
    assert shown is not None
    (tmp_path / "train.py").write_text(script[1])
    finished = dtypedoctor("exec", "--out", "runs/mine", "train.py", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert finished.code == 10
    assert finished.out == "finite: False\n" * 3
    assert without_numbers(shown[1].strip()) in without_numbers(finished.err)
    assert report_of(tmp_path / "runs" / "mine")["findings"][0]["confidence"] == "proven"
