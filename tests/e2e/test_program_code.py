"""The program's own code runs as often, as deep and from the same lines as without the tool: what it overrides, warns of and recurses into."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import forked, python

OVERRIDES = """
from collections import Counter
import torch
from torch import nn

counts = Counter()

def counted(name, original):
    def method(self, *args, **kwargs):
        counts[name] += 1
        return original(self, *args, **kwargs)
    return method

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x):
        return self.layer(x) * self.scale

    def __getattr__(self, name):
        if name not in ("layer", "scale", "inner"):
            counts[f"getattr {name}"] += 1
        return super().__getattr__(name)

class Outer(Inner):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return super().forward(self.inner(x))

for cls in (Inner, Outer):
    for name in ("parameters", "named_parameters", "modules", "named_modules", "buffers", "named_buffers", "children", "named_children",
                 "state_dict", "get_submodule", "extra_repr", "__repr__", "__dir__"):
        setattr(cls, name, counted(f"{cls.__name__}.{name}", getattr(nn.Module, name)))

class Metered(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        counts[f"function {getattr(func, '__name__', func)}"] += 1
        return super().__torch_function__(func, types, args, kwargs or {})

class MeteredParameter(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        counts[f"parameter {getattr(func, '__name__', func)}"] += 1
        return super().__torch_function__(func, types, args, kwargs or {})

torch.manual_seed(0)
model = Outer()
weights = [*nn.Module.parameters(model.layer), *nn.Module.parameters(model.inner.layer)]
optimizer = torch.optim.AdamW(weights)
counts.clear()
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
for step in range(2):
    optimizer.zero_grad()
    (model(torch.randn(4, 8).as_subclass(Metered)) * 2).mean().backward()
    optimizer.step()
(torch.randn(4).as_subclass(Metered) + 1).sum()
layer = nn.Linear(8, 8)
layer.weight = MeteredParameter(torch.randn(8, 8))
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for step in range(2):
    optimizer.zero_grad()
    layer(torch.randn(4, 8)).mean().backward()
    optimizer.step()
print(sorted(counts.items()))
"""


@pytest.mark.parametrize("source", [OVERRIDES], ids=["overrides"])
def test_the_programs_own_code_runs_as_without_the_tool(source: str, tmp_path: Path) -> None:
    """What it counts, and from where it is called, is the same."""
    script = tmp_path / "program.py"
    script.write_text(source)
    bare = python(script)
    assert bare.code == 0, bare.err
    assert bare.out
    ended = forked("exec", "--out", tmp_path / "run", script)
    assert ended.out.startswith(bare.out)
