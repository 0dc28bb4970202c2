"""Real runs, recorded: what is concluded from their traces, and which further runs are asked for."""

import json
from pathlib import Path

import pytest
from recorded import CONCLUDED, NAMES, concluded, play, rendered


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_run_is_diagnosed_as_before(name: str, tmp_path: Path, rewrite_snapshot: bool) -> None:
    """Each finding with its place, confidence, numbers, provenance and fixes; what each fix did; and no other run is asked for."""
    now = json.loads(json.dumps(concluded(play(name, tmp_path))))
    document = json.loads(CONCLUDED.read_text(encoding="utf-8")) if CONCLUDED.exists() else {}
    if rewrite_snapshot:
        CONCLUDED.write_text(rendered(document | {name: now}), encoding="utf-8")
        return
    assert now == document[name]


def test_conclusions_are_kept_of_recorded_runs_only() -> None:
    """A recording that was removed leaves no conclusions behind."""
    assert sorted(json.loads(CONCLUDED.read_text(encoding="utf-8"))) == NAMES
