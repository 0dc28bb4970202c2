"""The program's own code runs as often, as deep and from the same lines as without the tool: what it overrides, warns of and recurses into."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from command import dtypedoctor, forked, python

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
                 "state_dict", "get_submodule", "extra_repr", "__repr__", "__dir__", "__eq__", "__hash__"):
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
WARNINGS = """
import warnings
import torch
from torch import nn

def show(message, category, filename, lineno, file=None, line=None):
    print(message, category.__name__, filename, lineno)

warnings.simplefilter("always")
warnings.showwarning = show

def warn(where, levels):
    for level in levels:
        warnings.warn(f"{where}, {level}", stacklevel=level)

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        warn("forward", (1, 2, 3))  # beyond are lines of torch, which differ with hooks
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        warn("backward", range(1, 8))
        return gradient * 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        warn("module", (1, 2))
        y = Doubled.apply(self.layer(x))
        y.register_hook(lambda gradient: warn("hook", range(1, 7)))
        return y

    def _apply(self, function, recurse=True):
        warn("cast", (1, 2, 3))
        return super()._apply(function, recurse)

    def _load_from_state_dict(self, *args):
        warn("load", range(1, 6))
        super()._load_from_state_dict(*args)

class Descent(torch.optim.SGD):
    def step(self, closure=None):
        warn("step", range(1, 6))
        return super().step(closure)

def train():
    net = Net()
    optimizer = Descent(net.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    schedule.step()
    net(torch.randn(2, 4)).mean().backward(create_graph=True)
    optimizer.step()
    torch.autograd.backward(net(torch.randn(2, 4)).sum())
    torch.autograd.grad(net(torch.randn(2, 4)).sum(), list(net.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(net(torch.randn(2, 4)).mean()).backward()
    scaler.step(optimizer)
    net.load_state_dict(net.state_dict())
    net.double()

train()
"""
RECURSION = """
import sys
import torch
from torch import nn

class Deeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        global depth
        depth += 1
        return self(self.layer(x))

for _ in range(2):
    depth = 0
    try:
        Deeper()(torch.ones(2, 2))
    except RecursionError:
        print(depth, sys.getrecursionlimit())
"""


FUSED = """
import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
net = nn.Sequential(nn.Linear(8, 8), layer).eval()
for _ in range(3):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        half, single = layer(torch.randn(2, 3, 8).bfloat16()), layer(torch.randn(2, 3, 8))
        inside = net(torch.randn(2, 3, 8))
    print([(value.dtype, value.float().sum().item()) for value in (half, single, inside)])
"""
"""One kernel computes a whole layer, and leaves its casts to autocast, which is off below any dispatch mode."""


TRACEBACKS = """
import traceback
import torch
from torch import nn

class Checked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3))
    def forward(self, x):
        try:
            return self.inner(x)
        except RuntimeError as error:
            raise ValueError("a wrong shape") from error

for _ in range(3):
    try:
        Checked()(torch.ones(2, 4))
    except ValueError as error:
        for one in (error, error.__cause__):
            names = [frame.name for frame in traceback.extract_tb(one.__traceback__)]
            print([name for name in names if name not in ("_call_impl", "inner")])
"""
"""Its own exceptions are printed by the program, with the functions in which they were; how torch calls hooks is torch's."""


RECORDED = """
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return (self.layer(x) * 2 + torch.tensor(3.0)).bfloat16().float()

net, x = Net(), torch.randn(2, 4)
traced = torch.jit.trace(net, x)
print(traced.inlined_graph, traced(x))
print(torch.jit.trace(lambda v: (v * 2).sum() / 3, x).graph)
print(make_fx(lambda v: (v * 2).sum() / 3)(x).code, make_fx(net)(x).code)
print(torch.export.export(net, (x,)).graph_module.code)
"""
"""What torch writes down of it holds its own operators, and what comes of that is checked by torch."""


PROFILED = """
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

def step():
    optimizer.zero_grad()
    model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
    optimizer.step()

model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
step()
for profiler in (profile(activities=[ProfilerActivity.CPU]), torch.autograd.profiler.profile()):
    with profiler:
        step()
    print(sorted((event.key, event.count) for event in profiler.key_averages()))
"""
"""A program that counts its operators."""


MODES = """
from collections import Counter
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))

class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()
    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))

class Wrapped(torch.Tensor):
    seen = Counter()
    @staticmethod
    def __new__(cls, inner, requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=requires_grad)
    def __init__(self, inner, requires_grad=False):
        self.inner = inner
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen[str(func)] += 1
        args, kwargs = tree_map(lambda v: v.inner if isinstance(v, cls) else v, (args, kwargs or {}))
        return tree_map(lambda v: cls(v) if isinstance(v, torch.Tensor) else v, func(*args, **kwargs))

class Raising(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4).half()
    def forward(self, x):
        return self.layer(x)

def train():
    optimizer.zero_grad()
    checkpoint(model, torch.randn(2, 4).bfloat16(), use_reentrant=False).float().square().mean().backward()
    optimizer.step()

def overflow():
    (torch.ones(3).half() * 60000 * 60000).nan_to_num().sum().item()

def fail():
    try:
        Raising()(torch.ones(2, 4))
    except RuntimeError:
        pass

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2)).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
for step in (train, train, train, overflow, fail):
    with Operators() as operators, Functions() as functions:
        step()
    print(step.__name__, sorted(operators.seen.items()), sorted(functions.seen.items()))
for requires_grad in (False, True):
    output = model(Wrapped(torch.randn(2, 4).bfloat16(), requires_grad))
    if requires_grad:
        output.sum().backward()
    print(sorted(Wrapped.seen.items()))
"""
"""A program that counts operators and functions by modes and a class of its own."""


@pytest.mark.parametrize(
    "source",
    [OVERRIDES, WARNINGS, FUSED, TRACEBACKS, RECORDED, PROFILED, MODES],
    ids=["overrides", "warnings", "fused", "tracebacks", "recorded", "profiled", "modes"],
)
def test_the_programs_own_code_runs_as_without_the_tool(source: str, tmp_path: Path) -> None:
    """What it counts, and from where it is called, is the same."""
    script = tmp_path / "program.py"
    script.write_text(source)
    bare = python(script)
    assert bare.code == 0, bare.err
    assert bare.out
    ended = forked("exec", "--once", "--out", tmp_path / "run", script)
    assert ended.out.startswith(bare.out)


@pytest.mark.release
def test_a_program_recurses_as_deep_as_without_the_tool(tmp_path: Path) -> None:
    """Hooks, and the function by which torch calls them, take frames: module calls nest as deep all the same, and the run is recorded."""
    script = tmp_path / "program.py"
    script.write_text(RECURSION)
    alone = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True
    )  # a fork has the frames of the tests
    bare = [list(map(int, line.split())) for line in alone.stdout.splitlines()]
    ended = dtypedoctor("exec", "--out", tmp_path / "run", script)
    depths = [list(map(int, line.split())) for line in ended.out.splitlines()[:2]]
    assert [limit for _, limit in depths] == [limit for _, limit in bare]
    assert all(depth >= 0.97 * most for (depth, _), (most, _) in zip(depths, bare, strict=True))
    assert ended.code == 0, ended.out
