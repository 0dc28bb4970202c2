"""``exec --error-budget``: the changes of the loss that it attributes to modules, beside the loss of the same model in float64."""

from pathlib import Path
from typing import Any

import pytest
from command import Finished, forked, report_of

PROGRAM = """
import copy, sys, torch
from torch import nn

class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = Norm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(-1, -2) / 8).softmax(-1) @ v)
        return x + self.mlp(x)

torch.manual_seed(0)
mode = sys.argv[1]
model = nn.Sequential(nn.Embedding(64, 32), Block(32), Block(32), nn.Linear(32, 64))
if mode == "planted":
    with torch.no_grad():
        model[2].mlp[2].bias += 5  # its output is rounded to multiples of 1 / 32, and the head cancels what it adds
        model[3].weight -= model[3].weight.mean(-1, keepdim=True)
if mode in ("bfloat16", "planted"):
    model.bfloat16()
tokens = torch.randint(64, (4, 16))
exact = copy.deepcopy(model).double()

def loss_of(scores):
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())

with torch.autocast("cpu", dtype=torch.float16 if mode == "scaled" else torch.bfloat16, enabled=mode in ("autocast", "scaled")):
    loss = loss_of(model(tokens).float())
(loss * (1024 if mode == "scaled" else 1)).backward()
with torch.no_grad():
    right = loss_of(exact(tokens))
print(float((loss.double() - right) / right), *(float(p.grad.double().norm()) for p in model.parameters()))
"""


def recorded(folder: Path, mode: str, *options: str) -> tuple[Finished, dict[str, Any]]:
    """The program under ``exec``, and its report."""
    (folder / "train.py").write_text(PROGRAM)
    done = forked("exec", "--once", *options, "--out", "run", "train.py", mode, cwd=folder, OMP_NUM_THREADS="1")
    return done, report_of(folder / "run")


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("mode", ["scaled", "planted", "bfloat16", "autocast"])
def test_changes_of_the_loss_sum_up_to_its_distance_from_that_in_float64(tmp_path: Path, mode: str) -> None:
    """To first order: a fifth is left for products of errors, which count where they are large."""
    done, report = recorded(tmp_path, mode, "--error-budget")
    change = float(done.out.split()[0])
    assert sum(row["loss"] for row in report["error_budget"]) == pytest.approx(change, rel=0.2)
    assert sum(row["share"] for row in report["error_budget"]) == pytest.approx(1)


def test_the_module_whose_rounding_matters_comes_first(tmp_path: Path) -> None:
    """It and the sum that its result goes into have nearly all of the error, on the terminal and in the page, too."""
    done, report = recorded(tmp_path, "planted", "--error-budget")
    first, second = report["error_budget"][:2]
    assert {first["module"], second["module"]} == {"2", "2.mlp.2"}
    assert first["share"] + second["share"] > 0.9
    assert "Rounding changes the loss by about" in " ".join(done.err.split())
    assert "| `model[2].mlp.2` |" in (tmp_path / "run" / "report.md").read_text()


def test_measuring_it_changes_no_number_and_is_not_done_unasked(tmp_path: Path) -> None:
    """Losses and gradients have the same bits."""
    (tmp_path / "asked").mkdir()
    asked, _ = recorded(tmp_path / "asked", "autocast", "--error-budget")
    unasked, report = recorded(tmp_path, "autocast")
    assert asked.out == unasked.out
    assert report["error_budget"] == []


def test_without_half_precision_there_is_none_and_the_report_says_so(tmp_path: Path) -> None:
    """A program in float32."""
    _, report = recorded(tmp_path, "float32", "--error-budget")
    assert report["error_budget"] == []
    assert any(gap.startswith("the error budget: ") for gap in report["coverage"])
