"""Nothing hangs on the program's tensors after the call that put it there: conversions that swap them would refuse.

``Module.double()`` under FSDP2, and everywhere with ``set_swap_module_params_on_conversion``, exchanges a parameter with its converted copy
while the module keeps the object. It refuses one that has a weak reference, or that anything else in C++ holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command import forked, python
from forked_script import run_forked
from nursery import preload
from script_corpus import FOLDER
from tensor_states import State, noted

EACH = 12
"""Of the scripts, every so-manieth is run."""
SLOW = ("compile", "trainer", "fsdp", "accelerate")
PROGRAM = """
import copy, io, sys, pickle, torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
torch.manual_seed(0)

def net():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

def trained(model, zero=True):
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    if zero:
        optimizer.zero_grad()
    return model

def attempt(name, function):
    try:
        function()
        print(name)
    except Exception as error:
        print(name, "FAILED", type(error).__name__, error)

model = trained(net())
attempt("swap_tensors", lambda: torch.utils.swap_tensors(model[0].weight, nn.Parameter(torch.randn(8, 8))))
attempt("deepcopy", lambda: copy.deepcopy(model))
attempt("pickle", lambda: pickle.loads(pickle.dumps(model)))
attempt("save", lambda: torch.save(model, io.BytesIO()))
attempt("assign", lambda: model.load_state_dict(trained(net()).state_dict(), assign=True))
torch.__future__.set_swap_module_params_on_conversion(True)
attempt("load and swap", lambda: trained(model).load_state_dict(net().state_dict()))
for name in ("double", "half", "bfloat16", "float"):
    attempt(name, lambda: getattr(trained(net()), name)())
attempt("to", lambda: trained(net()).to(torch.float64))
attempt("with gradients", lambda: trained(net(), zero=False).double())
first, second = net(), net()
second(first(torch.randn(4, 8)))
attempt("two models, first", first.double)
attempt("two models, second", second.double)
for wrap in (parametrizations.weight_norm, parametrizations.orthogonal):
    layer = nn.Linear(8, 8)
    wrap(layer)
    attempt(wrap.__name__, trained(layer).double)
    attempt("taken off", lambda: parametrize.remove_parametrizations(layer, "weight"))
spoilt = net()
with torch.no_grad():
    spoilt(torch.full((4, 8), torch.inf))
    attempt("not finite", spoilt.double)
half = net().half()
half.load_state_dict(net().state_dict())
attempt("rounded", half.double)
"""
SHARDED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
for unit in (model[0], model[2], model):
    fully_shard(unit, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
model.double()
print("double", next(model.parameters()).dtype)
"""

COUNTED = """
import gc, torch
from torch import nn
torch.manual_seed(0)
def alive():
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.calls += 1
        angles = torch.arange(32, dtype=x.dtype) * 0.3
        return self.layers(x) + angles.cos()[:8]
gc.disable()
for dtype in (torch.bfloat16, torch.float16):
    model = Net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    counts = []
    for step in range(5):
        x = torch.randn(4, 8, dtype=dtype)
        loss = (model(x).float() - x.float()).square().mean()
        noise = (x * 3 + 1).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del x, loss, noise
        counts.append(alive())
    print(dtype, counts)
    x = torch.full((2, 8), 6e4, dtype=torch.float16) * 2
    print((x - x).isnan().any().item(), alive())
"""


@pytest.fixture(autouse=True, scope="module")
def libraries() -> None:
    """Those of the scripts, imported once."""
    preload(frozenset({"transformers", "peft"}))


def is_quick(path: Path) -> bool:
    """Whether a script compiles nothing and starts nothing."""
    source = path.read_text()
    return not any(word in source.lower() for word in SLOW)


HELD = {"healthy_ignored_labels_smoothing_scaler": "labels", "nonfinite_input_target": "rows"}
"""Of which a view goes into an outermost call: such inputs are held until the optimizer has stepped."""
SOME = list(filter(is_quick, sorted(FOLDER.glob("*.py"))))[::EACH]


def watched(path: str, script: Callable[[], None]) -> list[State]:
    import dtypedoctor

    with dtypedoctor.watch(out=Path("watched")):
        return noted(path, script)


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("path", SOME, ids=lambda path: path.stem)
def test_nothing_hangs_on_the_tensors_of_a_program(path: Path, tmp_path: Path) -> None:
    """Between calls each parameter, buffer, gradient, state and output has as many weak references, uses and hooks as without the tool."""
    for kind in ("bare", "watched"):
        (tmp_path / kind).mkdir()
    bare = run_forked(path, tmp_path / "bare", partial(noted, str(path)))
    seen = run_forked(path, tmp_path / "watched", partial(watched, str(path)))
    assert seen.raised == bare.raised, seen.message
    found, expected = ([state for state in run.evidence if state[2] != HELD.get(path.stem)] for run in (seen, bare))
    assert expected
    assert found == expected


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("in_place", ["", "late", "1"])
@pytest.mark.parametrize("source", [PROGRAM, SHARDED], ids=["conversions", "fsdp"])
def test_conversions_work_as_without_the_tool(source: str, in_place: str, tmp_path: Path) -> None:
    """Swapping, copying, pickling and assigning parameters, also where calls are kept and made again in the process itself, as on a GPU."""
    script = tmp_path / "program.py"
    script.write_text(source)
    bare = python(script)
    ended = forked("exec", "--once", "--out", tmp_path / "run", script, DTYPEDOCTOR_REPLAY_IN_PLACE=in_place)
    assert bare.out.count("\n") > 0
    assert "FAILED" not in bare.out
    assert bare.out in ended.out


def test_a_program_that_counts_all_tensors_counts_its_own(tmp_path: Path) -> None:
    """What a look keeps beside half precision is not in ``gc.get_objects()``, and dies without Python's collector."""
    script = tmp_path / "program.py"
    script.write_text(COUNTED)
    bare = python(script)
    assert bare.out.count("\n") > 0
    assert bare.out in forked("exec", "--once", "--out", tmp_path / "run", script).out
