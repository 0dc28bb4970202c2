"""What a watch has seen is gone with it: no model, gradient or optimizer state stays in memory because somebody once looked at it."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

import dtypedoctor


@pytest.fixture
def pair() -> Iterator[None]:
    """A group of two whose other process is only pretended."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    """Two layers around an activation; a spoilt one returns NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.spoilt = False

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(torch.relu(self.up(x)))
        return y * float("nan") if self.spoilt else y


def watched(kind: str, place: Path, *, fails: bool) -> list[weakref.ref[object]]:
    """Trains and watches a model of ``kind``; references to all that it was made of and all that it has made."""
    blocks = [Block() for _ in range(3)]
    model: nn.Module = nn.Sequential(*blocks)
    if kind == "fsdp":
        for unit in (*blocks, model):
            fully_shard(unit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with dtypedoctor.watch(model, out=place):
        for step in range(4):
            blocks[1].spoilt = fails and step == 2
            model(torch.randn(4, 8)).pow(2).mean().backward()
            for parameter in model.parameters() if kind == "reduced" else ():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [weakref.ref(one) for one in (*model.modules(), *model.parameters(), *states)]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("fails", [False, True], ids=["healthy", "fails"])
@pytest.mark.parametrize("kind", ["plain", "reduced", "fsdp"])
def test_what_was_watched_is_let_go_of(kind: str, fails: bool, pair: None, tmp_path: Path) -> None:
    """Circles through autograd's nodes and kernels in torch's dispatcher are beyond Python's collector, so none may hold it."""
    left = watched(kind, tmp_path / "watched", fails=fails)
    gc.collect()
    assert [type(one).__name__ for ref in left if (one := ref()) is not None] == []


def test_the_inputs_of_a_step_die_with_it(tmp_path: Path) -> None:
    """A call is kept until it is known that it has not failed, which on a CPU is so when the optimizer has made its step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> weakref.ref[Tensor]:
        x = torch.randn(2, 4)
        hidden = model[0](x)  # each of them is an outermost call
        model[1](hidden).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return weakref.ref(x)

    with dtypedoctor.watch(model, out=tmp_path / "watched"):
        assert [step()() for _ in range(4)] == [None] * 4


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("mode", ["trained", "not backward", "no_grad", "kept output"])
def test_a_model_dies_when_the_program_lets_go_of_it(mode: str, tmp_path: Path) -> None:
    """A program that frees one model to make room for the next must have that room, without Python's collector."""
    outputs = []

    def use() -> tuple[weakref.ref[nn.Module], weakref.ref[Tensor]]:
        model, x = nn.Linear(4, 4), torch.randn(2, 4)
        with torch.set_grad_enabled(mode != "no_grad"):
            y = model(x)
        if mode == "trained":
            y.sum().backward()
        if mode == "kept output":
            outputs.append(y.detach())
        return weakref.ref(model), weakref.ref(x)

    gc.collect()
    gc.disable()
    try:
        with dtypedoctor.watch(nn.Linear(1, 1), out=tmp_path / "watched"):
            assert [(model(), x()) for model, x in (use() for _ in range(3))] == [(None, None)] * 3
    finally:
        gc.enable()
