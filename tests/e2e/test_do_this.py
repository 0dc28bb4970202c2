"""What a report says under *Do this*, applied literally to a copy of the script, makes the failure disappear.

By default a few scripts are tried, before a release (``-m release``) all others. What became of each stands in ``do_this.json``; after a change::

    python -m pytest -q tests/e2e/test_do_this.py -m "" --rewrite-snapshot
"""

import json
from pathlib import Path

import pytest
from do_this import apply_advice, failing
from nursery import preload
from script_corpus import Case

MEASURED = Path(__file__).parent / "do_this.json"
SHARE = {
    "domain_error_log_negative",
    "model_input_float32_gru",
    "norm_promotes_rms_float32_weight",
    "overflow_residual_sum",
}
"""Scripts that are tried by default: torch alone, one edit of a kind."""
GOAL = 112
"""Failing scripts whose failure the shown edit removes, at least."""
CASES = [
    pytest.param(case, id=case.name, marks=() if case.name in SHARE else pytest.mark.release) for case in failing()
]


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("case", CASES)
def test_the_edit_makes_the_failure_disappear(case: Case, tmp_path: Path, rewrite_snapshot: bool) -> None:
    """The edited copy ends by itself, and the finding is gone; or there is no such edit, and the list of outcomes says so."""
    preload(case.imports)
    done = apply_advice(case, tmp_path)
    if rewrite_snapshot:
        measured = json.loads(MEASURED.read_text()) | {case.name: done.outcome}
        MEASURED.write_text(json.dumps(dict(sorted(measured.items())), indent=1) + "\n")
        return
    assert done.outcome == json.loads(MEASURED.read_text())[case.name], (done.left, done.edits)


def test_the_number_of_edits_that_fix() -> None:
    """Of all failing scripts, none left out."""
    measured = json.loads(MEASURED.read_text())
    assert measured.keys() == {case.name for case in failing()}
    assert list(measured.values()).count("gone") >= GOAL
