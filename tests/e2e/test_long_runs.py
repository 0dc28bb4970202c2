"""A long training under the real ``dtypedoctor exec``: its memory does not grow, its trace is bounded and read soon."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import dtypedoctor, report_of

from dtypedoctor.trace.reader import Sizes, read_trace

pytestmark = pytest.mark.release

SCRIPT = Path(__file__).with_name("long_training.py")
MEGABYTE = 1 << 20
BOUND = Sizes.head + (1 + Sizes.last + 2 * Sizes.around_events) * Sizes.file
"""Bytes that a trace of small steps never exceeds by more than what is written once."""
READ_SECONDS = 5.0

LATE = """
import torch
from torch import nn

class Scale(nn.Module):
    factor = 1.0

    def forward(self, x):
        return x * self.factor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), Scale(), nn.Linear(8, 8)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x

torch.manual_seed(0)
net = Net().half()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
for step in range(1, 23):
    if step == 20:
        net.layers[1][1].factor = 1e6
    net(torch.randn(4, 8, dtype=torch.float16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
KEYS = ("id", "fqn", "op", "phase", "step", "confidence")


def watched(steps: int, out: Path, timeout: float = 240) -> tuple[dict[str, float], int]:
    """What the watched training says of itself, and the bytes of its trace, in which every step is measured whole."""
    finished = dtypedoctor("exec", "--overhead-budget", "off", "--out", out, SCRIPT, str(steps), timeout=timeout)
    assert finished.code == 0, finished.err
    size = sum(path.stat().st_size for path in (out / "before").iterdir())
    return json.loads(finished.out.splitlines()[0]), size


def test_a_failure_in_a_thinned_step_is_proven_as_in_a_whole_one(tmp_path: Path) -> None:
    """The replay measures more than the run did; it is compared by what both have, each at its place and step."""
    script = tmp_path / "late.py"
    script.write_text(LATE)
    found = []
    for budget in ("off", "1/50"):
        out = tmp_path / f"run-{budget.replace('/', '-')}"
        finished = dtypedoctor("exec", "--overhead-budget", budget, "--out", out, script, timeout=240)
        assert finished.code == 10, finished.err
        found.append([{key: one[key] for key in KEYS} for one in report_of(out)["findings"][:1]])
    assert (
        found[0]
        == found[1]
        == [
            {
                "id": "float16-overflow",
                "fqn": "layers.1.1",
                "op": "aten.mul.Tensor",
                "phase": "forward",
                "step": 20,
                "confidence": "proven",
            }
        ]
    )


@pytest.mark.timeout(3600)
def test_a_hundred_thousand_steps(tmp_path: Path) -> None:
    """No more memory than unwatched but for 50 MB, a bounded trace, read within seconds; what was folded is said."""
    plain = subprocess.run([sys.executable, SCRIPT, "100000"], capture_output=True, text=True, check=True, timeout=1800)
    unwatched = json.loads(plain.stdout)
    told, size = watched(100_000, tmp_path / "run", timeout=3000)
    began = time.process_time()
    trace = read_trace(tmp_path / "run" / "before")
    seconds = time.process_time() - began
    print(json.dumps({"unwatched": unwatched, "watched": told, "bytes": size, "read_seconds": seconds}))
    assert told["growth"] < unwatched["growth"] + 50 * MEGABYTE
    assert size < BOUND
    assert seconds < READ_SECONDS
    assert trace.damage == ()
    assert trace.folded is not None
    report = report_of(tmp_path / "run")
    assert (report["status"], report["before"]["steps_completed"]) == ("healthy", 100_000)
    assert any("single measurements of steps" in line for line in report["coverage"])
