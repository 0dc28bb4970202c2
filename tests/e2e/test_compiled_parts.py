"""Models that a script compiles as a whole or in parts, with backends that call modules of Dynamo's own: none of these is named."""

from pathlib import Path

import pytest
from command import forked, report_of

SCRIPT = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(self.up(x) * x)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


torch.manual_seed(0)
tower = Tower().half()
with torch.no_grad():
    tower.blocks[1].up.weight.fill_(30000.0)
    tower.blocks[1].down.weight.fill_(0.0)
model = tower
COMPILED
loss = model(torch.ones(2, 8, dtype=torch.float16)).float().sum()
loss.backward()
print(loss.item())
"""

WAYS = {
    "whole": "model = torch.compile(tower, backend={backend!r})",
    "in place": "tower.compile(backend={backend!r})",
    "calls": "for block in tower.blocks: block.compile(backend={backend!r})",
    "forwards": "for block in tower.blocks: block.forward = torch.compile(block.forward, backend={backend!r})",
}


@pytest.mark.release
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS)
def test_an_overflow_in_compiled_code_has_the_place_that_it_has_in_eager_mode(
    way: str, backend: str, tmp_path: Path
) -> None:
    """The call is made again without the compiler; what Dynamo has made of its code is no module of the program's."""
    (tmp_path / "work.py").write_text(SCRIPT.replace("COMPILED", WAYS[way].format(backend=backend)))
    finished = forked("exec", "--once", "--out", "run", "work.py", cwd=tmp_path)
    assert finished.code == 10, finished.err
    report = report_of(tmp_path / "run")
    first = report["findings"][0]
    fqn = first["fqn"].removeprefix("_orig_mod.")  # what torch.compile wraps the whole model in
    assert (first["id"], fqn, first["confidence"]) == ("float16-overflow", "blocks.1.up", "proven"), finished.err
    assert "GraphModule" not in finished.err
    assert "<lambda>" not in finished.err
