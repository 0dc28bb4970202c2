"""A reproduction is kept only if it shows what a narrow dtype does."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtypedoctor.lab.bisect import measurements as reproduction
from dtypedoctor.lab.bisect.results import Kind, Symptom
from dtypedoctor.lab.scenarios.loading import case_of


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("FAILS: what down is given: 1 of 8 elements are inf or NaN in torch.float16", ""),
        ("FAILS: must be Half (nothing is raised in float32)", ""),
        ("FAILS: no attribute 'x' (no attribute 'x' in float32)", "raises in float32, too: no attribute 'x'"),
    ],
)
def test_a_script_that_raises_the_same_in_float32_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, reason: str
) -> None:
    """It was called a failure of the dtype."""
    (tmp_path / "capture.json").write_text(json.dumps({"recipe": {"class": "m:Block"}}))
    (tmp_path / "capture.safetensors").write_bytes(b"")
    monkeypatch.setattr(reproduction, "script_text", lambda *_, **__: "")
    monkeypatch.setattr(reproduction, "run_clean", lambda *_: (1, f"torch 2.13\n{said}\n", ""))
    runner: Any = SimpleNamespace(directory=tmp_path, run=lambda _: SimpleNamespace(directory=tmp_path))
    scenario = case_of("builtin:llama-tiny", "float16", "forward")
    setup: Any = SimpleNamespace(workload=scenario)
    failure = Symptom(kind=Kind.RAISED, reason="no", call=1)
    found = reproduction._attempt(runner, setup, "blocks.1", failure, "torch 2.13")
    assert found.reason.endswith(reason)
    assert (found.script, (tmp_path / "repro.py").exists()) == (("repro.py", True) if not reason else (None, False))
