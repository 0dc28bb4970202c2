"""What the op trace knows about tensors: which are the same, whose memory they are, where they came from."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from observed import observed
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from watched import watched

from dtypedoctor.instrument.operators import TensorIds
from dtypedoctor.instrument.whereabouts import MAX_DEPTH, tensors_held
from dtypedoctor.trace.events import Op, Replay
from dtypedoctor.trace.model import Trace


def seen(trace: Trace, kind: str) -> list[dict[str, Any]]:
    return [dict(o.values) for o in observed(trace, kind)]


def test_the_same_elements_are_one_tensor_in_whatever_wrapper() -> None:
    """A detached tensor and a view of the same shape are the tensor; a transposed view is another one in the same memory."""
    ids, x = TensorIds(), torch.ones(2, 3)
    number, memory = ids.of(x)
    assert ids.of(x.detach()) == ids.of(x.view(2, 3)) == (number, memory)
    other, same_memory = ids.of(x.t())
    assert other != number
    assert same_memory == memory


def test_a_write_makes_everything_in_that_memory_another_tensor() -> None:
    """Views of it too; memory that was not written to keeps its tensors."""
    ids, x, y = TensorIds(), torch.ones(2, 3), torch.ones(2, 3)
    before, untouched = ids.of(x), ids.of(y)
    ids.wrote(x.view(6))
    assert ids.of(x)[0] != before[0]
    assert ids.of(x)[1] == before[1]
    assert ids.of(y) == untouched


def test_freed_memory_is_not_taken_for_new_memory_at_its_address() -> None:
    """However often a buffer of one size is made and dropped, its number does not come back."""
    ids = TensorIds()
    assert len({ids.of(torch.empty(1000))[1] for _ in range(50)}) == 50


def test_tensors_are_found_inside_plain_objects_and_modules_are_left_alone() -> None:
    """A cache object that holds lists, nested no deeper than the limit; nothing loops."""

    class Cache:
        def __init__(self) -> None:
            self.keys = [torch.ones(1), torch.ones(2)]
            self.itself = self
            self.layer = nn.Linear(2, 2)

    found = dict(tensors_held({"cache": Cache()}))
    assert sorted(found) == ["cache.keys.0", "cache.keys.1"]
    deep: Any = torch.ones(1)
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    assert list(tensors_held(deep)) == []


class Reader(nn.Module):
    """Uses a parameter, a buffer, a plain attribute and two kinds of arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("shift", torch.ones(3))
        self.memory = torch.ones(3)

    def forward(self, x: Tensor, *, bias: Tensor) -> Tensor:
        return (x @ self.weight.t()).sum() + (self.shift + self.memory + bias).sum()


def test_operands_say_whose_memory_they_are(tmp_path: Path) -> None:
    """Also through a transposition; keyword arguments are inputs too."""
    net = Reader()
    trace = watched(tmp_path, lambda _: net(torch.ones(1, 3), bias=torch.ones(3)), traced=True)
    origins = {(t.name, t.origin) for op in trace.all(Op) for t in op.inputs if t.name}
    assert origins >= {
        ("weight", "parameter"),
        ("shift", "buffer"),
        ("memory", "attribute"),
        ("args.0", "input"),
        ("kwargs.bias", "input"),
    }


class Attend(nn.Module):
    """Hands whatever it gets to torch's attention."""

    def forward(self, q: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, q, v)


def test_a_function_that_refuses_before_any_operator_runs_is_recorded(tmp_path: Path) -> None:
    """With its operands, the name of its operator and replays; and no mode stays behind."""
    net = Attend()
    trace = watched(tmp_path, lambda _: net(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4).bfloat16()), traced=True)
    (failed,) = (op for op in trace.all(Op) if op.error)
    assert failed.op == "aten.scaled_dot_product_attention.default"
    assert [t.dtype for t in failed.inputs] == ["float32", "float32", "bfloat16"]
    assert {"equal-dtypes", "all-as-bfloat16", "all-as-float32"} <= {r.how for r in trace.all(Replay) if not r.note}
    assert _get_current_function_mode_stack() == []


def test_replays_of_a_refused_op_in_place_leave_the_tensor_as_it_was(tmp_path: Path) -> None:
    """They work on copies."""
    target = torch.ones(2, 2)

    class Accumulate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return target.addmm_(x, x)

    trace = watched(tmp_path, lambda _: Accumulate()(torch.ones(2, 2).bfloat16()), traced=True)
    assert [r.how for r in trace.all(Replay) if r.finite]
    assert torch.equal(target, torch.ones(2, 2))


def test_regions_are_recorded_with_their_device_and_whether_they_do_anything(tmp_path: Path) -> None:
    """One for a device that is not there is disabled by torch; each different region is told once."""
    net = nn.Linear(2, 2)

    def work(_: object) -> None:
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                net(torch.ones(1, 2))
        with torch.autocast("cuda", dtype=torch.float16):
            net(torch.ones(1, 2))

    regions = [(r["device"], r["wanted"], r["enabled"]) for r in seen(watched(tmp_path, work), "autocast-region")]
    assert regions == [("cpu", "bfloat16", True), ("cuda", "float16", torch.cuda.is_available())]


def test_a_region_that_the_program_switches_off_is_told_from_one_that_torch_does(tmp_path: Path) -> None:
    """As a decorator, by position or by name; torch disables one whose device is not there, and its warning names the program's line."""
    warned: list[str] = []

    def work(_: object) -> None:
        torch.autocast("cuda", enabled=False)(nn.Linear(2, 2))(torch.ones(1, 2))
        with torch.autocast("cuda", torch.bfloat16, False):
            nn.Linear(2, 2)(torch.ones(1, 2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            region = torch.autocast("cuda", dtype=torch.float16)
        warned.extend(warning.filename for warning in caught)
        with region:
            nn.Linear(2, 2)(torch.ones(1, 2))

    regions = [r.get("off", False) for r in seen(watched(tmp_path, work), "autocast-region")]
    assert regions == [True, True, False]
    assert warned == [__file__] * (not torch.cuda.is_available())


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("error", [False, True])
def test_what_a_scaler_unscales_is_recorded_before_it_does(error: bool, tmp_path: Path) -> None:
    """Dtypes of parameters and gradients, and parameters of no known module."""
    net, stranger = nn.Linear(2, 1), nn.Parameter(torch.ones(1))

    def work(_: object) -> None:
        optimizer = torch.optim.SGD([stranger] if error else [*net.parameters(), stranger], lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(net(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)

    trace = watched(tmp_path, work)
    (values,) = seen(trace, "unscale")
    assert values["strangers"] == 1
    assert values["gradients"] == ({} if error else {"float32": 2})
    assert (trace.end is not None and trace.end.outcome) == ("raised" if error else "completed")


def test_operators_of_a_module_that_a_hook_calls_are_in_that_module(tmp_path: Path) -> None:
    """No other module holds it: it and what it holds are named after its class, below the call that is still open when hooks of the inner one run."""
    model, probe = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Tanh())
    model[0].register_forward_hook(lambda module, args, output: probe(output))
    trace = watched(tmp_path, lambda _: model(torch.ones(1, 2)), traced=True)
    [tanh] = [op for op in trace.all(Op) if op.op == "aten.tanh.default"]
    assert (tanh.root, tanh.fqn) == (0, "Sequential().0")
