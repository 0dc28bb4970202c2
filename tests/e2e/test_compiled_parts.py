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


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", WAYS)
def test_an_overflow_in_compiled_code_has_the_place_that_it_has_in_eager_mode(
    way: str, backend: str, tmp_path: Path
) -> None:
    """The call is made again without the compiler; what Dynamo has made of its code is no module of the program's."""
    (tmp_path / "work.py").write_text(SCRIPT.replace("COMPILED", WAYS[way].format(backend=backend)))
    finished = forked("exec", "--out", "run", "work.py", cwd=tmp_path)
    assert finished.code == 10, finished.err
    report = report_of(tmp_path / "run")
    first = report["findings"][0]
    fqn = first["fqn"].removeprefix("_orig_mod.")  # what torch.compile wraps the whole model in
    assert (first["id"], fqn, first["confidence"]) == ("float16-overflow", "blocks.1.up", "proven"), finished.err
    assert "GraphModule" not in finished.err
    assert "<lambda>" not in finished.err


@pytest.mark.release
def test_what_a_compiled_function_computes_is_not_outside_of_all_modules(tmp_path: Path) -> None:
    """It may be a module's: the origin is in compiled code, and what was not measured is listed, also where nothing is found."""
    function = "model = torch.compile(lambda x: tower(x), backend='eager')"
    for name, gain in (("bad", "30000.0"), ("good", "1.0")):
        text = SCRIPT.replace("COMPILED", function).replace("30000.0", gain)
        (tmp_path / f"{name}.py").write_text(text)
    bad = forked("exec", "--out", "bad", "bad.py", cwd=tmp_path)
    assert bad.code == 10, bad.err
    first = report_of(tmp_path / "bad")["findings"][0]
    assert (first["id"], first["fqn"]) == ("float16-overflow", None)
    assert "in compiled code" in bad.err
    assert "outside of all modules" not in bad.err
    good = forked("exec", "--out", "good", "good.py", cwd=tmp_path)
    assert "no torch.nn.Module was called outside of compiled code" in " ".join(good.err.split())
    assert "the inside of compiled functions that were called outside of modules" in " ".join(good.err.split())


@pytest.mark.release
def test_a_bad_loss_is_not_blamed_on_what_was_not_measured(tmp_path: Path) -> None:
    """Where compiled code shows no operator, nothing is said of modules or of the data that was not seen."""
    function = """model = torch.compile(lambda x: tower(x), backend=lambda graph, _: hidden(graph.forward))"""
    hides = """from torch.utils._python_dispatch import _disable_current_modes
def hidden(forward):
    def call(*args):
        with _disable_current_modes():
            return forward(*args)
    return call
"""
    (tmp_path / "work.py").write_text(hides + SCRIPT.replace("COMPILED", function))
    finished = forked("exec", "--out", "run", "work.py", cwd=tmp_path)
    assert finished.code == 10, finished.err
    first = report_of(tmp_path / "run")["findings"][0]
    assert first["confidence"] == "possible"
    for said in (
        "everything that modules returned",
        "no operator of torch has made it",
        "no dtype of the model can help",
    ):
        assert said not in " ".join(finished.err.split()).lower()
    assert "--ablate compile" in finished.err
