"""Whole scripts under another condition: whether it took effect, and what that says of the failure."""

import textwrap
from pathlib import Path

from exec_corpus import treat_forked

from dtypedoctor.examination.results import Bearing, Outcome, Treatment, Trial
from dtypedoctor.lab.trials.treatment import Plan

OVERFLOW = """
    import torch
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for parameter in net.parameters():
        parameter.data.fill_(100.0)
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            net(torch.ones(4, 8))
"""
"""Under autocast the second layer leaves float16's range."""


def treated(folder: Path, source: str, *conditions: str) -> Treatment:
    """The treatment of a script that is to be run under each of these conditions."""
    path = folder / "work.py"
    path.write_text(textwrap.dedent(source))
    return treat_forked(path, folder, Plan(certify=False, only=frozenset(conditions)), conditions)


def trial_of(treatment: Treatment, condition: str) -> Trial:
    return next(trial for trial in treatment.trials if trial.remedy == condition)


def test_a_script_under_another_condition_says_whether_the_failure_needs_it(tmp_path: Path) -> None:
    """How often that took effect is measured, it stands in the evidence, and nothing is cured by it."""
    treatment = treated(tmp_path, OVERFLOW, "autocast-off")
    first, trial = treatment.findings[0], trial_of(treatment, "autocast-off")
    assert first.id == "float16-overflow"
    assert trial.diagnostic is not None, trial.reason
    assert (trial.diagnostic.bearing, trial.diagnostic.effects, trial.safe) == (Bearing.NEEDED, 3, False), trial.reason
    assert trial.outcome is Outcome.FIXED
    assert "autocast-off, which took effect" in first.evidence[-1]


def test_a_condition_that_would_settle_something_is_proposed_with_the_way_to_try_it(tmp_path: Path) -> None:
    """The script does not run under it unasked."""
    treatment = treated(tmp_path, OVERFLOW)
    assert "autocast-off" in treatment.findings[0].remedies
    trial = trial_of(treatment, "autocast-off")
    assert trial.outcome is Outcome.NOT_TRIED
    assert "--ablate autocast" in trial.reason
