"""inf and NaN that a program writes by name: where they spoil a training their line is named, and where they only mark something nothing is said."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_in_place import in_place
from torch import Tensor, nn

from dtypedoctor.analysis import diagnose
from dtypedoctor.trace.events import Op

INF, NAN = float("inf"), float("nan")


def assigns(value: float) -> Callable[[Tensor], Tensor]:
    """Writes through a view of a view."""

    def write(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1)[3] = value
        return x

    return write


def assigns_rows(x: Tensor) -> Tensor:
    """Writes by an index tensor."""
    x = x.clone()
    x[torch.tensor([0, 1])] = INF
    return x


def fills(x: Tensor) -> Tensor:
    """Has a function write."""
    return x.masked_fill(torch.arange(x.numel()).view(x.shape) == 3, INF)


def replaces(x: Tensor) -> Tensor:
    """Makes a tensor of nothing else."""
    return torch.full_like(x, NAN)


class Writes(nn.Module):
    """Hands on what a function has written, if it may."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(x)


def training(write: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    """A step of a training of a model with that module in it."""

    def program() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Writes(write), nn.Linear(8, 8), nn.LayerNorm(8))
        model(torch.randn(4, 8)).pow(2).mean().backward()

    return program


@pytest.mark.parametrize(
    "write",
    [assigns(INF), assigns(NAN), assigns_rows, fills, replaces],
    ids=["inf", "nan", "rows", "fills", "replaces"],
)
def test_the_line_that_writes_it_is_named(write: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """Neither the data, nor the first module that computes with it, nor the norm that makes NaN of it."""
    found = diagnose(in_place(tmp_path, training(write)))[0]
    assert (found.id, found.fqn) == ("domain-error", "1")
    assert found.source is not None
    assert found.source.startswith("test_written_numbers.py")
    assert "writes" in found.summary


class Nearest(nn.Module):
    """Marks what is too far with inf, and what is missing with NaN, and computes with neither."""

    def forward(self, x: Tensor) -> Tensor:
        far = x.clone()
        far[:, 0] = INF
        self.missing = torch.full_like(x, NAN)
        return (
            torch.where(far.isfinite(), far, torch.zeros_like(far))
            + torch.nan_to_num(self.missing)
            + far.amin(1, keepdim=True)
        )


@pytest.mark.parametrize("model", [Nearest(), Writes(lambda x: torch.where(x > 5, x, -INF).softmax(-1).nan_to_num())])
def test_marks_that_nothing_computes_with_are_no_failure(model: nn.Module, tmp_path: Path) -> None:
    """The loss and the gradients are finite."""

    def program() -> None:
        whole = nn.Sequential(nn.Linear(8, 8), model, nn.Linear(8, 8))
        whole(torch.randn(4, 8)).pow(2).mean().backward()

    assert [one.id for one in diagnose(in_place(tmp_path, program))] == []


def test_a_difference_of_two_marks_is_the_mistake(tmp_path: Path) -> None:
    """Where one module writes inf and takes it from inf, the subtraction is to blame."""

    def subtracts(x: Tensor) -> Tensor:
        marked = torch.full_like(x, INF)
        return x + (marked - marked)

    trace = in_place(tmp_path, training(subtracts))
    found = diagnose(trace)[0]
    assert (found.op, found.fqn) == ("aten.sub.Tensor", "1")
    assert any(op.op == "aten.full_like.default" for op in trace.all(Op))
