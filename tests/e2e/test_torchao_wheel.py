"""torchao's released float8 linear layer, unchanged and emulated on a CPU: quiet with its scales, found without them."""

from pathlib import Path

import pytest
import torch
from command import forked, report_of
from released_wheels import released

pytestmark = pytest.mark.release

TRAINING = """
import sys

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, float8_scaling_utils

if "unscaled" in sys.argv:
    float8_scaling_utils.tensor_to_scale = lambda tensor, *args, **kwargs: torch.tensor(1.0)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16))
convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    x = torch.randn(32, 64) * 1e-4
    loss = (model(x) - x[:, :16]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.skipif(
    not hasattr(torch.nn.functional, "ScalingType"),
    reason=f"torchao 0.18.0 is written for torch 2.11 ({torch.__version__})",
)
@pytest.mark.parametrize("words", [[], ["unscaled"]], ids=["scaled", "unscaled"])
def test_float8_layers_of_torchao_are_found_without_their_scales_only(tmp_path: Path, words: list[str]) -> None:
    """The line is the library's own cast."""
    (tmp_path / "train.py").write_text(TRAINING)
    library = {"PYTHONPATH": str(released("torchao", "0.18.0")), "OMP_NUM_THREADS": "1"}
    done = forked("exec", "--out", tmp_path / "run", tmp_path / "train.py", *words, cwd=tmp_path, **library)
    findings = report_of(tmp_path / "run")["findings"]
    if not words:
        assert (done.code, findings) == (0, []), done.err
        return
    found = findings[0]
    assert (found["id"], found["fqn"], found["source"]) == ("float8-range", "0", "torchao/float8/float8_utils.py:137")
