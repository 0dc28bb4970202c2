"""Whole scripts under another condition: whether it took effect, and what that says of the failure."""

import textwrap
from pathlib import Path

import pytest
from exec_corpus import treat_forked
from nursery import preload

from dtypedoctor.examination.results import Bearing, Outcome, Treatment, Trial
from dtypedoctor.lab.trials.treatment import Plan

OVERFLOW = """
    import torch
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for parameter in net.parameters():
        parameter.data.fill_(100.0)
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            net(torch.ones(4, 8){cast})
"""
"""Under autocast the second layer leaves float16's range; a model in float16 does so without."""

SCALED = """
    import torch
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=0.99)
    for step in range(12):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = net(torch.randn(8, 4)).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
"""The scale is far too large, and hardly comes down."""

COMPILED = """
    import torch
    def backend(graph, examples):
        return lambda *inputs: tuple(result / 0 if result.is_floating_point() else result for result in graph(*inputs))
    net = torch.compile(torch.nn.Linear(4, 4), backend=backend)
    with torch.no_grad():
        for step in range(2):
            net(torch.ones(2, 4))
"""
"""A compiler that divides by zero."""

ATTENTION = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    net = LlamaForCausalLM(config).half()
    net.model.norm.weight.data.fill_(6e4)
    with torch.no_grad():
        net(torch.arange(8)[None])
        torch.nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 2, 8, 8))
"""
"""The last norm overflows, however attention is computed."""


@pytest.fixture(scope="module", autouse=True)
def libraries_are_imported_once() -> None:
    """Children are forked from a process that has them."""
    preload(frozenset({"transformers"}))


def treated(folder: Path, source: str, *conditions: str) -> Treatment:
    """The treatment of a script that is to be run under each of these conditions."""
    path = folder / "work.py"
    path.write_text(textwrap.dedent(source))
    return treat_forked(path, folder, Plan(certify=False, only=frozenset(conditions)), conditions)


def trial_of(treatment: Treatment, condition: str) -> Trial:
    return next(trial for trial in treatment.trials if trial.remedy == condition)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("source", "condition", "finding", "bearing", "effects"),
    [
        (OVERFLOW.format(cast=""), "autocast-off", "float16-overflow", Bearing.NEEDED, 3),
        (OVERFLOW.format(cast=".half()"), "autocast-off", "float16-overflow", Bearing.MOVED, 1),
        (SCALED, "loss-scale-one", "loss-scale-exhausted", Bearing.NEEDED, 1),
        (COMPILED, "compile-off", "compile-only-nonfinite", Bearing.NEEDED, 2),
        (ATTENTION, "eager-attention", "float16-overflow", Bearing.NOT_NEEDED, 2),
    ],
    ids=["autocast", "autocast-hid-a-mismatch", "loss-scale", "compiler", "attention"],
)
def test_a_script_under_another_condition_says_whether_the_failure_needs_it(
    source: str, condition: str, finding: str, bearing: Bearing, effects: int, tmp_path: Path
) -> None:
    """How often that took effect is measured, it stands in the evidence, and nothing is cured by it."""
    treatment = treated(tmp_path, source, condition)
    first, trial = treatment.findings[0], trial_of(treatment, condition)
    assert first.id == finding
    assert trial.diagnostic is not None, trial.reason
    assert (trial.diagnostic.bearing, trial.diagnostic.effects, trial.safe) == (bearing, effects, False), trial.reason
    assert (trial.outcome is Outcome.FIXED) == (bearing is Bearing.NEEDED)
    assert f"{condition}, which took effect" in first.evidence[-1]


def test_a_condition_that_would_settle_something_is_proposed_with_the_way_to_try_it(tmp_path: Path) -> None:
    """The script does not run under it unasked."""
    treatment = treated(tmp_path, OVERFLOW.format(cast=""))
    assert "autocast-off" in treatment.findings[0].remedies
    trial = trial_of(treatment, "autocast-off")
    assert trial.outcome is Outcome.NOT_TRIED
    assert "--ablate autocast" in trial.reason
