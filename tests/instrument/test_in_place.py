"""Calls that fail are made again in the process itself: what the op trace then says, and that the program cannot tell."""

import ctypes
import importlib
import io
import json
import logging
import os
import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.nonfinite_origin import is_unsettled
from dtypedoctor.instrument import repeated_call, session
from dtypedoctor.instrument.in_place import OF_ALL_CAPSULES, _Waiting
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.instrument.live_call import LiveCall
from dtypedoctor.instrument.module_tree import calls_alone
from dtypedoctor.instrument.operators import is_unfinished
from dtypedoctor.instrument.repeated_call import CopiesOfParameters, KeptCall, ParameterCopies, PlacesOfParameters
from dtypedoctor.instrument.untouched import CannotReplayError, KeptMemory, as_before
from dtypedoctor.trace.events import REPLAY_OF_FAILURES, NotWatched, Op
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import ReplayedCall
from dtypedoctor.trace.records.silent import GradientZeros, ScaledBackward


class Square(nn.Module):
    """Overflows float16 for operands of 300."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x


class MixedBackward(torch.autograd.Function):
    """Its backward multiplies float32 by float16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradient.float() @ w.t(), x.t() @ gradient


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return MixedBackward.apply(x, self.weight)


def overflows_forward() -> None:
    """Without gradients."""
    with torch.no_grad():
        nn.Sequential(nn.Identity(), Square())(torch.full((2, 4), 300.0, dtype=torch.float16))


def mixes_dtypes() -> None:
    """A float16 layer gets float32."""
    nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).half())(torch.ones(2, 4))


def mixes_dtypes_backward() -> None:
    """Only the backward of a custom function does."""
    nn.Sequential(nn.Linear(4, 4).half(), Custom())(torch.ones(2, 4).half()).float().sum().backward()


def overflows_backward() -> None:
    """Through large weights."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    with torch.no_grad():
        model[1].weight.fill_(30.0)
    (model(torch.ones(2, 4).half() / 1000).float().sum() * 60000).backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()


def overflows_backward_after() -> None:
    """The gradient that comes back to a module was made by the module that the program calls after it."""
    first, act, second = nn.Linear(4, 4).half(), nn.ReLU(), nn.Linear(4, 4).half()
    with torch.no_grad():
        first.weight.fill_(0.01)
        second.weight.fill_(30.0)
    second(act(first(torch.ones(2, 4).half()))).backward(torch.full((2, 4), 6e4, dtype=torch.float16))
    torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3).step()


def overflows_backward_of_a_weight() -> tuple[nn.Module, nn.Module]:
    """Nothing but the gradient of the first module's weight, summed over the rows, is not finite."""
    first, second = nn.Linear(4, 4, bias=False).half(), nn.Linear(4, 4, bias=False).half()
    with torch.no_grad():
        first.weight.fill_(0.01)
        second.weight.fill_(1.0)
    second(first(torch.full((512, 4), 4.0, dtype=torch.float16))).float().mul(10).sum().backward()
    torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-3).step()
    return first, second


def recomputes_backward() -> None:
    """The gradient overflows in a block that reentrant checkpointing recomputes, which ``autograd.grad`` rejects."""
    inner, outer = nn.Linear(4, 4).half(), nn.Linear(4, 4).half()
    with torch.no_grad():
        outer.weight.fill_(30.0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = inner, outer

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.outer, self.inner(x), use_reentrant=True)

    model = Model()
    (model(torch.ones(2, 4).half() / 1000).float().sum() * 60000).backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()


def _trains_float16(optimizer: type[torch.optim.Optimizer], *, steps: int = 3, **options: Any) -> nn.Module:
    """Two layers in float16; nothing but the optimizer can go wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)).half()
    training = optimizer(model.parameters(), **options)
    for step in range(steps):
        if step == 1:
            training.param_groups[0]["lr"] /= 2
        model(torch.arange(4)).float().square().mean().backward()
        training.step()
        training.zero_grad()
    return model


class OwnStep(torch.optim.Optimizer):
    """Divides by a second moment that is 0 for rows without a gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.past: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.past.append(parameter.grad.square())
                parameter.sub_(group["lr"] * parameter.grad / (self.past[-1].sqrt() + 1e-10))


@pytest.mark.release(all_but=4)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("optimizer", "options", "finding", "confidence", "operators", "step"),
    [
        (torch.optim.AdamW, {}, "optimizer-epsilon-underflow", "proven", ("addcdiv_", "_foreach_addcdiv_"), 1),
        (torch.optim.AdamW, {"foreach": True}, "optimizer-epsilon-underflow", "proven", ("_foreach_addcdiv_",), 1),
        (OwnStep, {}, "optimizer-epsilon-underflow", "proven", ("div",), 1),
        (torch.optim.SGD, {"lr": 6e4, "weight_decay": 1.0}, "float16-overflow", "proven", ("add_", "_foreach_add_"), 1),
        (
            torch.optim.SGD,
            {"lr": 6e4, "weight_decay": 1.0, "foreach": True},
            "float16-overflow",
            "proven",
            ("_foreach_add_",),
            1,
        ),
    ],
)
def test_an_optimizer_step_that_spoils_a_parameter_is_made_again(
    tmp_path: Path, optimizer: Any, options: dict[str, Any], finding: str, confidence: str, operators: tuple[str, ...],
    step: int, device: str,
) -> None:  # fmt: skip
    """On copies of what it began with; the operator and the line that calls ``step`` are named, and the parameters are what they were."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    found: list[nn.Module] = []
    with torch.device(device):
        trace = in_place(tmp_path, lambda: found.append(_trains_float16(optimizer, **options)))
        bare = _trains_float16(optimizer, **options)
    first = diagnose(trace)[0]
    assert (first.id, first.phase, first.step, first.confidence.value) == (finding, "optimizer", step, confidence)
    assert first.op is not None
    assert first.op.split(".")[1] in operators
    assert [seen.what.why for seen in trace.observed(ReplayedCall)] == ["optimizer"]
    assert {seen.what.doubt for seen in trace.observed(ReplayedCall)} == {None}
    sources = {op.source for op in trace.all(Op) if op.phase == "optimizer" and not op.sentinel}
    assert all(source.startswith("test_in_place.py") for source in sources), sources
    for one, other in zip(found[0].parameters(), bare.parameters(), strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


def in_place(directory: Path, program: Callable[[], Any], *, force: int = 0) -> Trace:
    """The trace of a program whose failing calls are made again in this process."""

    def work(instruments: Instruments) -> None:
        instruments.in_place.begin(force=force)
        program()

    return watched(directory, work)


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    ("program", "name", "module"),
    [
        (overflows_forward, "capsule-1-nonfinite", "1"),
        (mixes_dtypes, "capsule-1-raised", "1"),
        (mixes_dtypes_backward, "capsule-1-raised", "1"),
        (overflows_backward, "capsule-1-backward", "1"),
    ],
)
def test_the_smallest_call_is_left_as_a_capsule(
    tmp_path: Path, program: Callable[[], Any], name: str, module: str
) -> None:
    """Beside the trace; its description names the module that fails by itself."""
    in_place(tmp_path, program)
    description = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    assert description["fqn"] == module
    assert (tmp_path / f"{name}.safetensors").stat().st_size


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("limit", "is_left"), [(1, False), (1 << 40, True)])
def test_a_capsule_keeps_the_limit_that_was_given(tmp_path: Path, limit: int, is_left: bool) -> None:
    """Also one above the usual 64 MiB; a capsule that is larger is not left."""

    def work(instruments: Instruments) -> None:
        instruments.in_place.begin(capsule_limit=limit)
        overflows_backward()

    watched(tmp_path, work)
    assert bool(list(tmp_path.glob("capsule-*.safetensors"))) is is_left


def test_all_capsules_of_a_run_together_have_a_limit(tmp_path: Path) -> None:
    """Each call that fails would leave one until it is known which of them is wanted."""
    (tmp_path / "one").mkdir()
    watched(tmp_path / "one", lambda one: (one.in_place.begin(), overflows_forward()))
    size = sum(path.stat().st_size for path in (tmp_path / "one").glob("capsule-*.safetensors"))
    (tmp_path / "all").mkdir()
    watched(
        tmp_path / "all", lambda one: (one.in_place.begin(capsule_limit=size), [overflows_forward() for _ in range(8)])
    )
    left = [path.stat().st_size for path in (tmp_path / "all").glob("capsule-*.safetensors")]
    assert len(left) > 1
    assert sum(left) <= OF_ALL_CAPSULES * size


@pytest.mark.release(all_but=3)
@pytest.mark.parametrize(
    ("program", "finding", "op", "phase"),
    [
        (overflows_forward, "float16-overflow", "aten.mul.Tensor", "forward"),
        (mixes_dtypes, "operand-dtype-mismatch", "aten.addmm.default", "forward"),
        (mixes_dtypes_backward, "operand-dtype-mismatch", "aten.mm.default", "backward"),
        (overflows_backward, "backward-overflow", "aten.mm.default", "backward"),
        (overflows_backward_after, "backward-overflow", "aten.mm.default", "backward"),
        (overflows_backward_of_a_weight, "backward-overflow", "aten.mm.default", "backward"),
        (recomputes_backward, "backward-overflow", "aten.mm.default", "backward"),
    ],
)
def test_one_run_with_a_replay_in_place_names_the_operator(
    tmp_path: Path, program: Callable[[], Any], finding: str, op: str, phase: str
) -> None:
    """The finding is what a second run with the op trace on would say, and nothing is left to look at."""
    trace = in_place(tmp_path, program)
    first = diagnose(trace)[0]
    assert (first.id, first.op, first.phase, first.step) == (finding, op, phase, 1)
    assert first.confidence.value == "proven"
    assert not is_unsettled(trace)
    assert {seen.what.doubt for seen in trace.observed(ReplayedCall)} == {None}
    assert not trace.damage


class Scores(nn.Module):
    """Two layers whose gradients are as small as what comes back to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.listen, self.speak = nn.Linear(12, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.speak(torch.dropout(torch.relu(self.listen(x)), 0.1, True))


def trains_with(factor: float, *, inputs: float = 1.0, scaler: torch.amp.GradScaler | None = None) -> list[Tensor]:
    """Two steps of SGD in float16, in autocast where there is a scaler, with the loss multiplied by ``factor``; the parameters after them."""
    model = Scores() if scaler is not None else Scores().half()
    region = torch.autocast("cpu", torch.float16, enabled=scaler is not None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        x = inputs * torch.randn(16, 12).half()
        with region:
            loss = model(x).float().log_softmax(-1).amax(-1).mean() * factor
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_gradients_that_float16_flushes_to_zero_are_told_from_those_that_are_zero(tmp_path: Path, device: str) -> None:
    """The call is made again with a multiplied upstream gradient; the training does not change, and dropout draws the same."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    found: list[list[Tensor]] = []
    with torch.device(device):
        trace = in_place(tmp_path, lambda: found.append(trains_with(1e-6)))
        bare = trains_with(1e-6)
    first = diagnose(trace)[0]
    assert (first.id, first.phase, first.step, first.confidence.value) == (
        "gradient-underflow",
        "backward",
        1,
        "proven",
    )
    assert "the gradient of what the model returns multiplied by 32768" in first.proven_by
    assert not is_unsettled(trace)
    for one, other in zip(found[0], bare, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_that_are_zero_in_any_dtype_are_no_underflow(tmp_path: Path, scaled: bool) -> None:
    """Those of a layer whose inputs are all zero; and nothing is made again where a gradient scaler is at work."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0) if scaled else None
    trace = in_place(tmp_path, lambda: trains_with(1.0, inputs=0.0, scaler=scaler))
    assert trace.observed(GradientZeros)
    assert bool(trace.observed(ScaledBackward)) is not scaled
    assert "gradient-underflow" not in {finding.id for finding in diagnose(trace)}
    assert not is_unsettled(trace)


def test_a_backward_pass_is_not_replayed_with_parameters_that_it_has_spoilt(tmp_path: Path) -> None:
    """A failure that becomes known after the optimizer's step is not blamed on the parameters that this step has made inf."""

    def work(instruments: Instruments) -> None:
        instruments.in_place.begin(late=True)
        models.extend(overflows_backward_of_a_weight())
        nn.Linear(4, 4)(torch.ones(2, 4))

    models: list[nn.Module] = []
    trace = watched(tmp_path, work)
    assert {(found.id, found.phase) for found in diagnose(trace)} == {("backward-overflow", "backward")}
    (why,) = {note.why for note in trace.all(NotWatched) if note.what == REPLAY_OF_FAILURES}
    assert "not finite any more" in why


def test_what_cannot_be_made_again_is_named(tmp_path: Path) -> None:
    """The program goes on; the reason is among what was not watched."""

    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            (tmp_path / "made-by-the-program").write_text(f"{(tmp_path / 'made-by-the-program').exists()}")
            return x * x

    (tmp_path / "trace").mkdir()
    trace = in_place(tmp_path / "trace", lambda: Writes()(torch.full((2,), 300.0, dtype=torch.float16)))
    (why,) = [note.why for note in trace.all(NotWatched) if note.what == REPLAY_OF_FAILURES]
    assert why.startswith("a call of the model cannot be made again: ")
    assert "outside of the process (open)" in why
    assert (tmp_path / "made-by-the-program").read_text() == "False"
    assert not trace.observed(ReplayedCall)


def test_a_kernel_that_is_compiled_by_the_replay_alone_is_no_change_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that was compiled as a whole launches its Triton kernels for the first time when it is made again in eager mode."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget  # not needed to be there
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    sizes = count(4)

    @triton.jit
    def double(x, n):  # type: ignore[no-untyped-def]
        x + n

    class Launches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            source = ASTSource(double, signature={"x": "i32", "n": "constexpr"}, constexprs={"n": next(sizes)})
            triton.compile(source, target=GPUTarget("cuda", 80, 32))
            return x * x

    (tmp_path / "trace").mkdir()
    trace = in_place(tmp_path / "trace", lambda: Launches()(torch.full((2,), 300.0, dtype=torch.float16)))
    assert trace.observed(ReplayedCall)
    assert not [note.why for note in trace.all(NotWatched) if note.what == REPLAY_OF_FAILURES]
    assert next(sizes) > 5


def steps_on_a_small_loss(loss_of: Callable[[Tensor, Tensor], Tensor], *, factor: float, autocast: bool) -> None:
    """Three steps of Adam whose loss is multiplied by ``factor``, in float16 by autocast or by the weights."""
    model = Scores() if autocast else Scores().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-15 if autocast else 1e-4)
    x, y = torch.randn(16, 12), torch.randn(16, 4)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss = loss_of(model(x if autocast else x.half()), y)
        (loss * factor).backward()
        optimizer.step()


def cast_before(z: Tensor, y: Tensor) -> Tensor:
    return (z.float() - y).square().mean()


def promoted(z: Tensor, y: Tensor) -> Tensor:
    return (z - y).square().mean()


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("factor", [1e-9, 0.0])
@pytest.mark.parametrize(("loss_of", "autocast"), [(nn.MSELoss(), True), (cast_before, False), (promoted, False)])
def test_a_loss_whose_gradient_is_lost_on_the_way_to_the_model_is_no_healthy_one(
    tmp_path: Path, loss_of: Callable[[Tensor, Tensor], Tensor], autocast: bool, factor: float
) -> None:
    """Only zeros come back to the model, so nothing that is multiplied there tells; where they are zero in float32 too, all is well."""
    trace = in_place(tmp_path, lambda: steps_on_a_small_loss(loss_of, factor=factor, autocast=autocast))
    assert [finding.id for finding in diagnose(trace)] == (["gradient-underflow"] if factor else [])


class Deeper(nn.Module):
    """Calls itself until something stops it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor, left: int) -> Tensor:
        x = self.layer(x)
        return self(x, left - 1) if left else x


def test_a_recursion_that_ends_at_pythons_limit_is_not_made_again(tmp_path: Path) -> None:
    """No dtype has to do with it, and each of its calls would make all those below it."""

    def work(instruments: Instruments) -> None:
        instruments.in_place.begin()
        with pytest.raises(RecursionError):
            Deeper()(torch.ones(2, 2), -1)
        assert instruments.in_place.count == 0

    assert not watched(tmp_path, work).observed(ReplayedCall)


def test_a_call_of_a_deep_recursion_does_not_count_those_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the square of the depth."""
    counted = []
    monkeypatch.setattr(session, "is_followed", lambda module: bool(counted.append(module)))
    watched(tmp_path, lambda _: Deeper()(torch.ones(2, 2), 50))
    assert not counted


def test_a_result_that_differs_is_said(tmp_path: Path) -> None:
    """A call that depends on something that cannot be put back is not the same again."""
    numbers = iter(range(300, 400))

    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * next(numbers) * torch.tensor([300.0, 1.0], dtype=torch.float16)

    trace = in_place(tmp_path, lambda: Counts()(torch.ones(2, dtype=torch.float16)))
    assert [seen.what.doubt for seen in trace.observed(ReplayedCall)] == [
        "the result of the replay differs from that of the call"
    ]


def overflows_then_mixes() -> nn.Module:
    """Its first call overflows; each later one rejects its dtypes before that."""
    numbers = iter(range(1, 100))

    class Later(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x if next(numbers) == 1 else x @ x.float()

    return nn.Sequential(Later())


def rejects_then_mixes() -> nn.Module:
    """Its first call raises a ValueError; each later one rejects its dtypes."""
    numbers = iter(range(1, 100))

    class Later(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if next(numbers) == 1:
                raise ValueError("not this input")
            return x @ x.float()

    return nn.Sequential(Later())


@pytest.mark.parametrize("make", [overflows_then_mixes, rejects_then_mixes])
def test_a_replay_that_fails_otherwise_leaves_no_capsule(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    """What it shows is not the failure of the program."""
    with suppress(ValueError):
        trace = in_place(tmp_path, lambda: make()(torch.full((2, 2), 300.0, dtype=torch.float16)))
    assert all(seen.what.doubt for seen in trace.observed(ReplayedCall))
    assert not list(tmp_path.glob("capsule-*"))


class Table(nn.Module):
    """Makes a table in the default dtype, and multiplies with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.linspace(0, 1, 4)


def test_a_recomputation_under_another_default_dtype_is_made_again_as_it_was(tmp_path: Path) -> None:
    """The forward pass has the default dtype of then, the backward pass that of now, and the capsule raises what the program raised."""
    block = Table().bfloat16()
    outer = nn.Sequential()
    outer.forward = lambda x: checkpoint(block, x, use_reentrant=False)  # type: ignore[method-assign]
    outer.add_module("block", block)

    def trains() -> None:
        torch.set_default_dtype(torch.bfloat16)
        loss = outer(torch.ones(2, 4, requires_grad=True)).sum()
        torch.set_default_dtype(torch.float32)
        loss.backward()

    trace = in_place(tmp_path, trains)
    assert [(seen.what.why, seen.what.doubt) for seen in trace.observed(ReplayedCall)] == [("backward raised", None)]
    assert torch.get_default_dtype() is torch.float32
    for path in tmp_path.glob("capsule-*.json"):
        assert json.loads(path.read_text(encoding="utf-8"))["error"].startswith("CheckpointError")


def test_a_silent_failure_leaves_the_call_that_shows_it(tmp_path: Path) -> None:
    """All that it returns is finite."""

    class Bounded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.nan_to_num(x * x, posinf=1.0)

    trace = in_place(tmp_path, lambda: nn.Sequential(nn.Identity(), Bounded())(torch.full((2, 4), 300.0).half()))
    description = json.loads((tmp_path / "capsule-1-silent.json").read_text(encoding="utf-8"))
    assert (description["fqn"], description["kind"]) == ("1", "silent")
    assert not trace.observed(ReplayedCall)


class Overflows(nn.Module):
    """Overflows float16, with dropout, an attribute and a buffer that change in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return torch.dropout(x.half().abs() + 300, 0.1, True).square()


class Normalized(nn.Module):
    """Batch statistics, dropout, attributes, a list, a counter in a closure, a buffer, prints, logs, a file, random numbers of all kinds."""

    def __init__(self, log: Any, *, overflows: bool = False) -> None:
        super().__init__()
        self.overflows = Overflows() if overflows else nn.Identity()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.embed = nn.Embedding(4, 8, max_norm=0.5)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.past: list[Tensor] = []
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(3)
        self.log = log
        count = [0]

        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            count[0] += 1

        self.count = count
        self.norm.register_forward_hook(hook)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.past.append(x.detach())
        self.log.write(f"{self.calls}\n")
        print("call", self.calls)
        logging.getLogger("program").warning("call %d", self.calls)
        noise = torch.rand(8, generator=self.generator) + random.random() + np.random.rand()
        x = torch.dropout(self.norm(x), 0.3, True) + self.embed(torch.arange(x.shape[0]) % 4) + noise.float()
        x = x + torch.nan_to_num(self.overflows(x), posinf=0.5).clamp(max=1)
        return self.lstm(checkpoint(self.linear, x, use_reentrant=False)[:, None])[0][:, 0]


def trains_overflowing(log: Any) -> list[Any]:
    """The same with a module whose float16 result is inf, which is replayed and reduced to a capsule."""
    return trains_normalized(log, overflows=True)


def trains_normalized(log: Any, *, overflows: bool = False) -> list[Any]:
    """Two micro-batches a step; everything that it has changed."""
    model = Normalized(log, overflows=overflows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        for part in torch.randn(2, 6, 8):
            model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = [model.calls, len(model.past), model.count[0], model.generator.get_state(), model.seen._version]
    return [*model.state_dict().values(), *kept, *_states(optimizer)]


def trains_llama(log: Any) -> list[Any]:
    """Under autocast and a loss scaler, then generation with a key-value cache."""
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=2, intermediate_size=32, num_attention_heads=2, vocab_size=32
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(8)[None]
    scaler = torch.amp.GradScaler(tokens.device.type, init_scale=1024.0)
    for _ in range(3):
        with torch.autocast(tokens.device.type, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    text = model.eval().generate(tokens, max_new_tokens=6, do_sample=True, pad_token_id=0)
    return [*model.state_dict().values(), *_states(optimizer), text, loss.detach(), scaler.get_scale()]


def writes_in_place(log: Any) -> list[Any]:
    """To a buffer, to its input and to a dictionary among its arguments."""

    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(8, 4))
            self.proj = nn.Linear(4, 4)

        def forward(self, x: Tensor, at: int, held: dict[str, Any]) -> Tensor:
            self.keys[at] = self.proj(x).detach()[0]
            held.setdefault("all", []).append(at)
            held["last"] = self.keys[: at + 1].clone()
            x.mul_(2)
            return self.keys[: at + 1].sum(0)

    model = Cache()
    held: dict[str, Any] = {}
    results: list[Any] = []
    with torch.inference_mode():
        for at in range(8):
            given = torch.randn(1, 4)
            results += [model(given, at, held), given]
    return [*results, held["all"], held["last"], model.keys, model.keys._version]


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("program", [trains_normalized, trains_overflowing, trains_llama, writes_in_place])
def test_healthy_programs_are_bitwise_unchanged_by_forced_replays(
    tmp_path: Path, program: Callable[[Any], list[Any]], device: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Results, weights, buffers and how often they were written to, optimizer, generators, output, logs and files."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")

    fails = program is trains_overflowing

    def ran(name: str, force: int) -> list[Any]:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        logged = io.StringIO()
        handler = logging.StreamHandler(logged)
        logging.getLogger("program").addHandler(handler)
        found: list[Any] = []
        (tmp_path / name).mkdir()
        with torch.device(device), (tmp_path / f"{name}.log").open("w", encoding="ascii") as log:
            if force:
                trace = in_place(tmp_path / name, lambda: found.extend(program(log)), force=force)
                assert not [note for note in trace.all(NotWatched) if note.what == REPLAY_OF_FAILURES]
                assert len({op.call for op in trace.all(Op)}) >= (1 if fails else 4)
                assert bool(list((tmp_path / name).glob("capsule-*.json"))) is fails
            else:
                program_result = program(log)
                found.extend(program_result)
        logging.getLogger("program").removeHandler(handler)
        written = (tmp_path / f"{name}.log").read_text(encoding="ascii")
        return [
            *found,
            torch.get_rng_state(),
            random.random(),
            np.random.rand(),
            logged.getvalue(),
            written,
            capfd.readouterr(),
        ]

    for one, other in zip(ran("bare", 0), ran("replayed", 1000 if fails else 1), strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_memory_that_was_written_to_is_put_back_with_its_version() -> None:
    """A view, its base and an output argument are one memory; what was made inside is not kept."""
    base = torch.arange(6.0)
    memory = KeptMemory()
    with memory:
        base[2:].mul_(2)
        torch.add(base, 1, out=base)
        torch.zeros(3).add_(1)
    memory.restore()
    assert base.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert base._version == 0


def test_memory_that_was_written_to_in_inference_mode_is_put_back() -> None:
    """As kernels do whose functions are in inference mode, with buffers that they have made there."""
    with torch.inference_mode():
        buffer = torch.arange(3.0)
    other, memory = torch.arange(3.0), KeptMemory()
    with memory, torch.inference_mode():
        buffer.mul_(2)
        other.mul_(2)
    memory.restore()
    assert (buffer.tolist(), other.tolist()) == ([0.0, 1.0, 2.0], [0.0, 1.0, 2.0])


def test_an_operator_of_several_ranks_is_not_run_again(tmp_path: Path) -> None:
    """Also one of a library's own, of symmetric memory or of DTensor: they are known by the ranks that they are told."""
    calls: list[str] = []

    @torch.library.custom_op("dtypedoctor_tests::sum_of_ranks", mutates_args=())
    def sum_of_ranks(x: Tensor, group_name: str) -> Tensor:
        calls.append(group_name)
        return x.clone()

    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sum_of_ranks(x, "all") * x

    with torch.no_grad():
        trace = in_place(tmp_path, lambda: Sums()(torch.full((2,), 300.0, dtype=torch.float16)))
    (why,) = [note.why for note in trace.all(NotWatched) if note.what == REPLAY_OF_FAILURES]
    assert why.endswith("cannot be made again: sum_of_ranks needs the other ranks")
    assert calls == ["all"]
    others = (torch.ops._dtensor.shard_dim_alltoall, torch.ops.symm_mem.one_shot_all_reduce, torch.ops.c10d.barrier)
    assert all(is_unfinished(one.default) for one in others)
    assert not is_unfinished(torch.ops.aten.native_group_norm.default)


def test_collectives_are_not_put_together_in_a_replay_nor_in_a_thread_that_works_for_it() -> None:
    """Autograd's threads for CUDA devices take the modes of the thread that calls them."""
    said: list[str] = []

    def work() -> None:
        with KeptMemory():
            try:
                torch.distributed.ProcessGroup._start_coalescing(None, torch.device("cpu"))
            except (CannotReplayError, TypeError) as error:
                said.append(str(error))

    with as_before((), threading.get_ident(), lambda: False):
        work()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert said == ["a group of collectives needs the other ranks"] * 2


def _kept(live: LiveCall) -> KeptCall:
    return KeptCall(live=live, size=8, number=0, step=0, call=1, overrides=(), regions=())


def test_a_waiting_call_whose_parameters_come_back_spoilt_is_given_up(tmp_path: Path) -> None:
    """Each look at them waits for the device, and what is not finite stays so."""
    net = nn.Linear(2, 2)

    def work(instruments: Instruments) -> None:
        replays = instruments.in_place
        replays.begin()
        live = LiveCall.entered(net, "", (torch.ones(1, 2),), {})
        kept = _kept(live)
        replays._waiting.append(_Waiting(kept=kept, why="value", backward=False, gone="weight"))
        nn.init.constant_(net.weight, float("nan"))
        net(torch.ones(1, 2))
        assert not replays._waiting

    trace = watched(tmp_path, work)
    assert any("not finite any more" in note.why for note in trace.all(NotWatched) if note.what == REPLAY_OF_FAILURES)


def test_a_model_whose_parameters_deepspeed_has_partitioned_is_not_called_alone() -> None:
    """A gather that is broken off would leave its mark on the parameters, and the next step would wait for it."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert calls_alone(net) == [net]
    for number, parameter in enumerate(net.parameters()):
        parameter.ds_id = number  # type: ignore[attr-defined]
    assert not calls_alone(net)


def test_what_is_imported_for_the_first_time_writes_no_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file would be one that the replay changes; the import goes on without."""
    (tmp_path / "seen_for_the_first_time.py").write_text("VALUE = 3", encoding="ascii")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    with as_before((), threading.get_ident(), lambda: False):
        assert importlib.import_module("seen_for_the_first_time").VALUE == 3
    assert not sys.dont_write_bytecode
    assert [path.name for path in tmp_path.iterdir()] == ["seen_for_the_first_time.py"]


def test_copies_of_parameters_stand_in_for_them_and_are_taken_away_again() -> None:
    """One copy of a tensor that two modules share; what the optimizer does to the originals does not reach them."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    originals = dict(net.named_parameters(remove_duplicate=False))
    copies = ParameterCopies(PlacesOfParameters(net))
    before = {name: parameter.detach().clone() for name, parameter in originals.items()}
    with torch.no_grad():
        net[0].weight.fill_(torch.nan)
    with copies.in_place():
        assert net[1].weight is net[0].weight is not originals["0.weight"]
        assert all(torch.equal(before[name], parameter) for name, parameter in net.named_parameters())
    assert all(parameter is originals[name] for name, parameter in net.named_parameters(remove_duplicate=False))
    assert copies.size == 4 * (4 + 2 + 2)


def test_copies_that_were_used_longest_ago_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a backward pass these are those of the last units, of which it is known by then whether they were finite."""
    monkeypatch.setattr(repeated_call, "MAX_HELD", 3 * 24)
    nets = [nn.Linear(2, 2) for _ in range(4)]
    calls = [_kept(LiveCall.entered(net, str(number), (), {})) for number, net in enumerate(nets)]

    def work(instruments: Instruments) -> None:
        copies = CopiesOfParameters(instruments.session)
        for call in (*calls, calls[1], calls[0]):
            copies.keep(call, calls)
        assert [call.copies is not None for call in calls] == [True, True, False, True]
        copies.keep(calls[0], calls[:1])
        copies.keep(calls[2], calls[:1])
        assert [call.copies is not None for call in calls] == [True, False, True, False]

    watched(tmp_path, work)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_of_parameters_are_made_without_waiting_for_the_device(tmp_path: Path) -> None:
    """A training step whose units of FSDP2 are resharded waits as often as without the watch."""
    from tests.benchmarks.counting import count_synchronisations

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))).cuda()
        for block in net:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
        fully_shard(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

        def step() -> None:
            net(torch.ones(4, 64, device="cuda")).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(5):
            step()
        expected = count_synchronisations(step)

        def work(instruments: Instruments) -> None:
            instruments.in_place.begin()
            for _ in range(5):
                step()
            assert count_synchronisations(step) == expected
            assert all(kept.copies is not None for kept in instruments.in_place._calls)

        watched(tmp_path, work)
    finally:
        dist.destroy_process_group()


def offloaded(model: nn.Module, folder: Path) -> None:
    """As with ``cpu_offload``: weights are on the CPU, and on ``meta`` between calls."""
    cpu_offload(model, execution_device=torch.device("cpu"))


def dispatched(model: nn.Module, folder: Path) -> None:
    """As with ``device_map="auto"`` where memory is short: one part on a device, another on the disk."""
    dispatch_model(model, {"0": "disk", "1": "cpu"}, "cpu", offload_dir=folder / "offload", force_hooks=True)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("spread", [offloaded, dispatched])
def test_a_call_whose_weights_an_offload_loads_is_made_again(
    spread: Callable[[nn.Module, Path], None], tmp_path: Path
) -> None:
    """Its hooks set variables of the environment, which are put back, and hold a mapping that raises where somebody else iterates it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Square()).half()
    with torch.no_grad():
        model[0].weight.fill_(100.0)
    spread(model, tmp_path)
    before = dict(os.environ)
    trace = in_place(tmp_path, lambda: model(torch.ones(2, 4, dtype=torch.float16)))
    assert [note for note in trace.all(NotWatched) if "operators" in note.what or note.what == REPLAY_OF_FAILURES] == []
    assert [found.id for found in diagnose(trace)] == ["float16-overflow"]
    assert any(op.op == "aten.mul.Tensor" for op in trace.all(Op))
    assert dict(os.environ) == before


def test_variables_of_the_environment_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the replay has set, changed and taken away; what it changes outside of the process is still rejected."""
    monkeypatch.setenv("HOME", "/nowhere")
    before = dict(os.environ)
    with as_before([], threading.get_ident(), bool):
        os.environ["DTYPEDOCTOR_TEST_NEW"] = "1"
        os.environ["PATH"] = ""
        del os.environ["HOME"]
        with pytest.raises(CannotReplayError):
            os.mkdir("/never/made")
    assert dict(os.environ) == before


def test_the_driver_may_be_asked_for_devices_and_no_other_library_is_loaded() -> None:
    """A torch that is built for CUDA asks it each time, also where there is no such library."""
    with as_before([], threading.get_ident(), bool):
        with suppress(OSError):
            ctypes.CDLL("libnvidia-ml.so.1")
        with pytest.raises(CannotReplayError):
            ctypes.CDLL("libof-somebody-else.so")


class _Again(torch.autograd.Function):
    """Computes in the backward pass again, in float16."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", dtype=torch.float16):
            torch.autograd.backward(ctx.run(x), gradients)
        return None, x.grad


def test_what_a_backward_pass_recomputes_is_no_result_of_the_call(tmp_path: Path) -> None:
    """A replay is compared by what the call itself returns: its recomputation overflows, in another dtype."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    nn.init.normal_(second[0].weight, std=3e4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            again: Tensor = _Again.apply(self.second, self.first(x))
            return again

    trace = in_place(tmp_path, lambda: Model()(torch.full((2, 4), 10.0)).sum().backward())
    assert {seen.what.doubt for seen in trace.observed(ReplayedCall)} == {None}
    found = diagnose(trace)[0]
    assert (found.id, found.phase, found.confidence.value) == ("float16-overflow", "recompute", "proven")


def test_parameters_that_the_program_has_updated_itself_are_not_blamed(tmp_path: Path) -> None:
    """It becomes known after the update, which has made them inf, that the call before it has overflowed."""

    def work(instruments: Instruments) -> None:
        instruments.in_place.begin(late=True)
        model = nn.Sequential(nn.Linear(4, 4), Square()).half()
        with torch.no_grad():
            model[0].weight.fill_(100.0)
            model(torch.ones(2, 4, dtype=torch.float16))
            for parameter in model.parameters():
                parameter.add_(torch.inf)
            nn.Linear(4, 4)(torch.ones(2, 4))

    trace = watched(tmp_path, work)
    assert "nonfinite-parameters" not in {found.id for found in diagnose(trace)[:1]}
    assert diagnose(trace)[0].id == "float16-overflow"


@pytest.mark.parametrize(("off", "rounds"), [(0.02, True), (0.5, False)])
def test_compiled_code_may_differ_from_its_replay_by_rounding(off: float, rounds: bool, tmp_path: Path) -> None:
    """A replay is made in eager mode. What differs by more than the dtype's spacing, for numbers of this size, is another result."""

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        return lambda *args: tuple(result * (1 + off) for result in graph.forward(*args))

    class Divides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / x.abs().sum(1, keepdim=True)

    def program() -> None:
        torch._dynamo.reset()
        model = torch.compile(nn.Sequential(nn.Linear(4, 4, bias=False), Divides()).bfloat16(), backend=backend)
        model(torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0] * 4], dtype=torch.bfloat16))

    trace = in_place(tmp_path, program)
    (replayed,) = [seen.what for seen in trace.observed(ReplayedCall)]
    assert (replayed.compared, replayed.rounds, replayed.doubt is None) == (True, rounds, rounds)


def test_a_compiled_call_that_is_finite_when_nothing_is_compiled_is_told(tmp_path: Path) -> None:
    """The replay is the experiment: under the op trace the same call runs in eager mode."""

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            return tuple(result.float().mul(torch.inf) for result in graph(*args))

        return run

    trace = in_place(tmp_path, lambda: torch.compile(nn.Linear(4, 4), backend=backend)(torch.ones(2, 4)))
    torch._dynamo.reset()
    assert [seen.what.why for seen in trace.observed(ReplayedCall)] == ["eager"]
    found = diagnose(trace)[0]
    assert (found.id, found.confidence.value) == ("compile-only-nonfinite", "proven")


def test_what_a_module_has_made_and_kept_is_not_taken_for_data(tmp_path: Path) -> None:
    """A loss of a module's own, in an attribute: no module returns it, and no operator outside of modules makes it."""

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = torch.log(x * 0 - 1)
            return x

    def program() -> None:
        model, x = Keeps(), torch.ones(2, 4, requires_grad=True)
        nn.functional.mse_loss(model(x), model.kept.detach()).backward()

    assert "nonfinite-input" not in {found.id for found in diagnose(in_place(tmp_path, program))}
