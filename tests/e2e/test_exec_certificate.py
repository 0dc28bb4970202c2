"""The observer certificate of scripts: losses, gradients and parameters are bitwise equal without the watch."""

import textwrap
from pathlib import Path

import pytest
from exec_corpus import treat_forked
from nursery import preload

from dtypedoctor.examination.results import Observer
from dtypedoctor.lab.trials.treatment import Plan

MODELS = {
    "dense": "net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))",
    "checkpointed": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)), nn.Linear(8, 1)
    def forward(self, x):
        return self.head(torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False))
net = Net()""",
    "4-bit": """
import bitsandbytes as bnb
packed = bnb.nn.Linear4bit(64, 8, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
packed.load_state_dict({"weight": torch.randn(8, 64)})
net = nn.Sequential(nn.Linear(8, 64), packed.to("cpu"), nn.Linear(8, 1))""",
    "with a sparse gradient": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 8, sparse=True)
    def forward(self, x):
        return self.table(x.argmax(-1) % 4)
net = Net()""",
}

TRAINING = """
import random, numpy, torch, torch.utils.checkpoint
from torch import nn
torch.use_deterministic_algorithms(True)
torch.manual_seed(0)
{model}
trained = [p for p in net.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.01)
for step in range(4):
    optimizer.zero_grad()
    scale = 1.0 + random.random() + numpy.random.rand(){more}
    net(torch.randn(4, 8) * scale).square().mean().backward()
    optimizer.step()
"""
"""Seeds neither Python nor numpy: the runs draw the same numbers all the same."""

HOOKED = " + bool(nn.modules.module._global_forward_hooks)"
"""Makes a program notice that it is watched."""


@pytest.fixture(scope="module", autouse=True)
def libraries_are_imported_once() -> None:
    """Children are forked from a process that has them."""
    preload(frozenset({"bitsandbytes"}))


def certificate(folder: Path, model: str, more: str = "") -> Observer:
    """What is said about a training script of this model, which is run watched and unwatched."""
    path = folder / "work.py"
    path.write_text(textwrap.dedent(TRAINING).format(model=MODELS[model], more=more))
    return treat_forked(path, folder, Plan(only=frozenset())).observer


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("model", MODELS)
def test_losses_gradients_and_parameters_are_bitwise_equal_without_the_watch(model: str, tmp_path: Path) -> None:
    """Random numbers of three libraries included; the reason says what was compared."""
    observer = certificate(tmp_path, model)
    assert observer.bitwise_equal is True, observer
    assert "loss of 4 step(s) and the gradients and parameters after each of them" in observer.reason


def test_a_training_that_goes_otherwise_when_watched_is_told_of(tmp_path: Path) -> None:
    """The first loss that differs is named with both values."""
    observer = certificate(tmp_path, "dense", HOOKED)
    assert observer.bitwise_equal is False
    assert observer.reason.startswith("loss of step 1 is ")
