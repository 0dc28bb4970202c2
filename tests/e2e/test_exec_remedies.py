"""Remedies for a script of somebody's own: what is tried, what is not, and the reason that the report gives."""

import textwrap
from pathlib import Path

import pytest
from exec_corpus import treat_forked
from nursery import preload

from dtypedoctor.examination.results import Outcome, Trial
from dtypedoctor.lab.trials.treatment import Plan
from dtypedoctor.trace.events import Correction
from dtypedoctor.trace.reader import read_trace

SQUARING = """
    import torch
    class {name}(torch.nn.Module):
        def forward(self, x):
            return x * x
    {name}()(torch.full((2, 2), 300.0).half())
"""
CORRECTION = "gemma4-mlp-float32-product"


@pytest.fixture(scope="module", autouse=True)
def libraries_are_imported_once() -> None:
    """Children are forked from a process that has them."""
    preload(frozenset({"transformers"}))


def trials(folder: Path, name: str, *wanted: str) -> dict[str, Trial]:
    """What became of the remedies for a script whose only module has this name, by their ids."""
    path = folder / "work.py"
    path.write_text(textwrap.dedent(SQUARING).format(name=name))
    treatment = treat_forked(path, folder, Plan(certify=False, only=frozenset(wanted)), wanted)
    assert treatment.findings[0].id == "float16-overflow"
    assert not (folder / f"remedy-{CORRECTION}").exists() or CORRECTION in wanted
    return {trial.remedy: trial for trial in treatment.trials}


def test_a_remedy_that_is_not_asked_for_is_proposed_with_the_way_to_try_it(tmp_path: Path) -> None:
    """The script does not run again, and no cure is claimed."""
    trial = trials(tmp_path, "Gemma4TextMLP")[CORRECTION]
    assert trial.outcome is Outcome.NOT_TRIED
    assert f"--try {CORRECTION}" in trial.reason


SCALED = """
    import torch
    from torch import nn

    class {name}(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((2,), 300.0))
        def forward(self, x):
            return x * self.scale

    model = nn.Sequential(nn.Linear(2, 2), {name}(), nn.Linear(2, 1)).half()
    nn.init.ones_(model[0].weight)
    nn.init.constant_(model[2].weight, 0.01)
    print((model(torch.full((2, 2), 900.0).half()).float() * 1e-6).sum())
"""


@pytest.mark.release
@pytest.mark.parametrize("fix", ["bfloat16", "keep-float32:model[1],model[2]"])
def test_a_model_that_the_script_builds_can_be_changed_from_outside(
    tmp_path: Path, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it in bfloat16, or the modules named, as reports show them, in float32; each counts that it was in use."""
    monkeypatch.setattr("test_exec_remedies.SQUARING", SCALED)
    trial = trials(tmp_path, "Scaled", fix)[fix]
    assert trial.outcome is Outcome.FIXED, trial.reason
    (record,) = [one for one in read_trace(next(tmp_path.glob("remedy-*"))).all(Correction) if one.hits][-1:]
    assert record.id in ("bfloat16-weights", "keep-float32")


@pytest.mark.release
def test_a_correction_that_fits_no_model_of_the_script_is_not_called_tried(tmp_path: Path) -> None:
    """It ran again, but nothing was installed: a healthy or a failing end would prove nothing."""
    trial = trials(tmp_path, "Square", CORRECTION)[CORRECTION]
    assert trial.outcome is Outcome.NOT_TRIED
    assert "it does not apply here" in trial.reason
    assert (tmp_path / f"remedy-{CORRECTION}").exists()
