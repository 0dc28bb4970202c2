"""Memory that a kernel of Triton, NumPy or an extension module fills: no operator writes to it, so the one that has made it is not to blame."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_in_place import in_place
from torch import Tensor, nn

from dtypedoctor.analysis import diagnose

Fill = Callable[[Tensor, Tensor], None]
Make = Callable[[int], Tensor]


def carries(out: Tensor, rows: Tensor) -> None:
    """A kernel that is right."""
    out.numpy()[:] = rows.numpy().sum(1)


def fails(out: Tensor, rows: Tensor) -> None:
    """A kernel that makes NaN of finite rows."""
    out.numpy()[:] = rows.numpy().sum(1) * float("nan")


class Reduces(torch.autograd.Function):
    """A kernel in the way in which libraries wrap theirs."""

    @staticmethod
    def forward(ctx: object, rows: Tensor, make: Make, fill: Fill) -> Tensor:
        out, largest = make(rows.shape[0]), torch.full((rows.shape[0],), float("-inf"))
        fill(out, rows.detach())
        largest[:1].clamp_(max=0)  # an accumulator that is meant to begin so
        return out.abs() + 1

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad[:, None].expand(-1, 8), None, None


class Net(nn.Module):
    """Divides by what may be 0, then calls the kernel."""

    def __init__(self, make: Make, fill: Fill, offset: float) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.make, self.fill, self.offset = make, fill, offset

    def forward(self, x: Tensor) -> Tensor:
        x = x / (x.abs().sum(1, keepdim=True) + self.offset)
        return Reduces.apply(self.inner(x), self.make, self.fill)  # type: ignore[no-any-return]


def training(make: Make, fill: Fill, offset: float) -> Callable[[], None]:

    def program() -> None:
        torch.manual_seed(0)
        Net(make, fill, offset)(torch.tensor([[1.0] * 8, [0.0] * 8])).mean().backward()

    return program


MAKERS = {
    "zeros": torch.zeros,
    "empty": torch.empty,
    "filled with -inf": lambda size: torch.full((size,), float("-inf")),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_went_wrong_before_the_kernel_is_the_origin(make: Make, tmp_path: Path) -> None:
    """The kernel only hands it on, which the report says is a conclusion."""
    finding = diagnose(in_place(tmp_path, training(make, carries, 0.0)))[0]
    assert (finding.op, finding.confidence.value) == ("aten.div.Tensor", "proven")
    assert any("passes no torch operator" in line and "concluded" in line for line in finding.evidence)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_kernel_that_goes_wrong_is_named_by_what_lies_around_it(make: Make, tmp_path: Path) -> None:
    """Nothing is said of the operator that has made the memory but that it has."""
    finding = diagnose(in_place(tmp_path, training(make, fails, 1.0)))[0]
    assert (finding.id, finding.op, finding.confidence.value) == ("domain-error", None, "likely")
    assert finding.summary.startswith("Code that passes no torch operator writes NaN")
    assert "aten.abs.default at test_unseen_writes.py" in finding.cause
