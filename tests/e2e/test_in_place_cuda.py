"""Scripts that fail on a GPU, run once: no fork of them can go on, so what failed is made again in the process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command import dtypedoctor

pytestmark = pytest.mark.gpu

TRAINING = """
import torch
from torch import nn

torch.manual_seed(0)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        h = self.up(x)
        return h * h


model = nn.Sequential(nn.Linear(64, 64), Gated(), nn.Linear(64, 1)).to("cuda", torch.float16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(1, 6):
    x = torch.randn(32, 64, device="cuda", dtype=torch.float16) * (1 if step < 3 else 3000)
    loss = model(x).float().mean()
    loss.backward()
    torch.cuda.synchronize()  # as reading the loss does
    optimizer.step()
    optimizer.zero_grad()
"""

BACKWARD = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to("cuda", torch.float16)
with torch.no_grad():
    model[2].weight.mul_(100)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(1, 4):
    x = torch.randn(32, 64, device="cuda", dtype=torch.float16)
    loss = model(x).float().mean() * (1 if step < 2 else 1e8)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    optimizer.step()
    optimizer.zero_grad()
"""

CUSTOM = """
import torch
from torch import nn


class Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.float().t() @ x


class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x):
        return Projection.apply(x, self.weight)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), Projected()).to("cuda", torch.bfloat16)
model(torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
"""

STALE = """
import bitsandbytes.functional as q4
import torch
from torch import nn

scratch = {}


class Packed(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        dense = 0.05 * torch.randn(128, 64, dtype=dtype, device="cuda")
        self.packed, self.state = q4.quantize_4bit(dense, quant_type="nf4")

    def forward(self, x):
        room = scratch.setdefault("room", torch.zeros(128, 64, dtype=self.state.dtype, device="cuda"))
        room.view(torch.int16).copy_(q4.dequantize_4bit(self.packed, self.state).view(torch.int16))
        return nn.functional.linear(x, room)


class Ranker(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.embed = nn.Embedding(80, 64, dtype=dtype, device="cuda")
        self.up = Packed(dtype)

    def forward(self, ids):
        return self.up(self.embed(ids))


torch.manual_seed(0)
ids = torch.randint(0, 80, (1, 16), device="cuda")
for dtype in (torch.float16, torch.bfloat16):
    net = Ranker(dtype)
    with torch.no_grad(), torch.autocast("cuda", dtype=dtype):
        print(net(ids).float().abs().mean().item())
"""


def once(tmp_path: Path, script: str) -> dict[str, Any]:
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    done = dtypedoctor("exec", "--once", "--out", tmp_path / "run", "script.py", cwd=tmp_path)
    assert (tmp_path / "run" / "report.json").is_file(), done.err
    report: dict[str, Any] = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"))
    print(json.dumps({key: report[key] for key in ("findings", "coverage")}, indent=1))
    return report


@pytest.mark.parametrize(
    ("script", "finding", "fqn", "op", "phase", "step"),
    [
        (TRAINING, "float16-overflow", "1", "aten.mul.Tensor", "forward", 3),
        (BACKWARD, "backward-overflow", None, "aten.mm.default", "backward", 2),
        (CUSTOM, "operand-dtype-mismatch", "1", "aten.mm.default", "backward", 1),
        (STALE, "stale-dequant-buffer", "up", "aten.mm.default", "forward", 2),
    ],
    ids=["forward", "backward", "custom-function", "stale-buffer"],
)
def test_one_run_of_a_script_on_a_gpu_names_the_operator(
    tmp_path: Path, script: str, finding: str, fqn: str | None, op: str, phase: str, step: int
) -> None:
    """Right operator, phase and step, proven, and nothing was run again."""
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    report = once(tmp_path, script)
    first = report["findings"][0]
    assert first["id"] == finding
    assert (first["phase"], first["step"], first["confidence"]) == (phase, step, "proven")
    assert first["op"] == op or finding == "stale-dequant-buffer"
    assert fqn is None or first["fqn"] == fqn
    assert any(line.startswith("Op trace:") and "in the process itself" in line for line in report["coverage"])
    kept = ["capsule"] if finding != "stale-dequant-buffer" else []
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == ["before", *kept]
    for name in kept:
        replayed = dtypedoctor("replay", tmp_path / "run" / name, "--allow-code", "--device", "cpu", cwd=tmp_path)
        print(replayed.out)
        assert f"Same verdict as in the run: {finding}, {op}" in replayed.said, replayed.out
