"""Operators of the script's own code that refuse two dtypes: found wherever in a training step they stand."""

from pathlib import Path

import pytest
from command import forked, report_of

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
average = [p.detach().clone().bfloat16() for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(4, 8)).sum()
    loss.backward()
    {step}
    if step == 1:
        torch._foreach_lerp_(average, [p.data for p in model.parameters()], 0.1)
"""


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("step", ["optimizer.step()", "optimizer.zero_grad()"], ids=["after-a-step", "without-steps"])
def test_an_average_in_another_dtype_is_found_at_its_line(step: str, tmp_path: Path) -> None:
    """It stands behind the backward pass, where the op trace of the call is over."""
    (tmp_path / "train.py").write_text(SCRIPT.format(step=step), encoding="utf-8")
    forked("exec", "--once", "--out", "run", "train.py", cwd=tmp_path)
    (finding,) = report_of(tmp_path / "run")["findings"]
    assert (finding["id"], finding["source"]) == ("operand-dtype-mismatch", "train.py:14")
