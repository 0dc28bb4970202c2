"""Edits that would change nothing, or break what works, are not suggested."""

from pathlib import Path

import pytest
from command import forked, report_of

pytestmark = pytest.mark.release

CAST_INSIDE = """
import torch
from torch import nn


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x):
        return self.f(x).float()


net = nn.Sequential(nn.Embedding(10, 8), Up(), nn.Linear(8, 10)).bfloat16()
ids = torch.randint(0, 10, (2, 5))
print(net(ids).sum().item())
"""
DIVISOR_IS_INF = """
import torch
from torch import nn

net = nn.Linear(4, 3)
w = net(torch.ones(2, 4)).exp()
w = w.masked_fill(torch.tensor([[False, False, True]]), float("inf"))
w = w / w.sum(1, keepdim=True)
w.sum().backward()
"""
HELPER = """
import torch
from torch import nn


class Ok(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 1)

    def forward(self, x):
        return self.a(x)


def train(model, opt, data):
    for x in data:
        loss = model(x).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
"""
OTHER_LOOP = """
import torch
from helper import Ok

model = Ok()
opt = torch.optim.SGD(model.parameters(), 0.1)
data = [torch.randn(4, 4), torch.tensor([[0.0, 0.0, 0.0, float("nan")]]), torch.randn(4, 4)]
for x in data:
    loss = model(x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
"""


def patch_for(folder: Path, script: str) -> str:
    """The edits for the first finding of a script; empty where there are none."""
    (folder / "script.py").write_text(script)
    out = folder / "run"
    finished = forked("exec", "--out", out, "script.py", cwd=folder)
    assert finished.code == 10, finished.err
    assert report_of(out)["findings"]
    patch = out / "do-this.patch"
    return patch.read_text() if patch.exists() else ""


def test_an_input_is_not_cast_where_the_cast_is_inside_of_the_model(tmp_path: Path) -> None:
    """Token ids in bfloat16 are no ids."""
    assert "ids.to(" not in patch_for(tmp_path, CAST_INSIDE)


def test_a_divisor_that_is_inf_is_not_kept_from_zero(tmp_path: Path) -> None:
    """inf / inf is NaN, and no bound below helps."""
    assert "== 0" not in patch_for(tmp_path, DIVISOR_IS_INF)


def test_a_loop_that_never_ran_is_not_edited(tmp_path: Path) -> None:
    """Of two loops that train, the one whose lines were executed gets the guard."""
    (tmp_path / "helper.py").write_text(HELPER)
    patch = patch_for(tmp_path, OTHER_LOOP)
    assert "helper.py" not in patch
    assert "script.py" in patch
