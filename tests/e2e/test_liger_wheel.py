"""Liger's released kernels, unchanged, in Triton's interpreter: a gradient that is not that of its forward, and the mended release."""

import json
from pathlib import Path

import pytest
from command import forked
from released_wheels import released

pytestmark = pytest.mark.release

PROGRAM = """
import torch
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
torch.manual_seed(0)
x, weight = torch.randn(12, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
optimizer = torch.optim.SGD([x, weight], lr=0.1)
loss = LigerFusedLinearCrossEntropyFunction.apply(
    x, weight, torch.randint(0, 40, (12,)), None, None, -100, 0.0, 0.0, "none")[0]
(loss * torch.linspace(0.1, 2, 12)).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("version", "code", "verdict"), [("0.7.0", 10, "gradient is not that of the forward"), ("0.8.2", 0, "")]
)
def test_the_gradient_of_losses_without_reduction(tmp_path: Path, version: str, code: int, verdict: str) -> None:
    (tmp_path / "fused.py").write_text(PROGRAM)
    folders = [released("liger_kernel", version), released("triton", "3.9.0")]
    environment = {"PYTHONPATH": ":".join(map(str, folders)), "TRITON_INTERPRET": "1"}
    done = forked("audit", "--format", "json", tmp_path / "fused.py", cwd=tmp_path, **environment)
    [kernel] = json.loads(done.out[done.out.index("{") :])["kernels"]
    assert (done.code, kernel["verdict"]) == (code, verdict)
    if not verdict:
        assert {"reference", "direction"} <= set(kernel["passed"])
