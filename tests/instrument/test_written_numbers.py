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

    def program() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Writes(write), nn.Linear(8, 8), nn.LayerNorm(8))
        model(torch.randn(4, 8)).pow(2).mean().backward()

    return program


@pytest.mark.release(all_but=2)
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


def test_a_finite_number_that_half_precision_does_not_hold_overflows_where_its_tensor_is_made(tmp_path: Path) -> None:
    """The number was not written as inf: float32 holds it, and the line that makes the tensor is the origin."""

    def program() -> None:
        model = nn.Sequential(nn.Linear(8, 8), Writes(lambda x: x * 0 * torch.tensor(1e5, dtype=x.dtype))).half()
        model(torch.randn(4, 8).half()).float().pow(2).mean().backward()

    found = diagnose(in_place(tmp_path, program))[0]
    assert (found.id, found.confidence) == ("float16-overflow", "proven")
    assert "reaches 100,000" in found.summary


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


def called(*modules: nn.Module) -> Callable[[], None]:
    """One call of them without gradients."""

    def program() -> None:
        torch.manual_seed(0)
        with torch.no_grad():
            nn.Sequential(nn.Linear(8, 8), *modules)(torch.ones(4, 8))

    return program


def test_nan_that_a_program_gets_from_a_model_is_not_called_harmless(tmp_path: Path) -> None:
    """Nothing is trained, and what the outermost module returns is all that there is."""
    program = called(Writes(lambda x: torch.where(x > 0, x, NAN)), nn.Linear(8, 1))
    found = diagnose(in_place(tmp_path, program))[0]
    assert (found.id, found.fqn) == ("domain-error", "1")


def test_memory_that_was_never_written_is_named(tmp_path: Path) -> None:
    """torch fills it with NaN where it is asked to, and with whatever was there where it is not."""

    def unwritten(x: Tensor) -> Tensor:
        return torch.empty(4, 8) + x

    try:
        torch.use_deterministic_algorithms(True)
        found = diagnose(in_place(tmp_path, training(unwritten)))[0]
    finally:
        torch.use_deterministic_algorithms(False)
    assert (found.id, found.fqn) == ("domain-error", "1")
    assert "memory that it has not written" in found.summary


def test_memory_that_is_written_before_it_is_used_is_not_named(tmp_path: Path) -> None:
    """An empty tensor is filled by parts, as of a batch that is put together."""

    def filled(x: Tensor) -> Tensor:
        made = torch.empty_like(x)
        made[:2] = x[:2]
        made[2:] = x[2:]
        return made

    try:
        torch.use_deterministic_algorithms(True)
        assert diagnose(in_place(tmp_path, training(filled))) == ()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_number_of_the_code_times_inf_is_arithmetic(tmp_path: Path) -> None:
    """``(1 - mask) * -inf`` is NaN where the mask is 1, and nobody has written NaN."""

    def biased(x: Tensor) -> Tensor:
        return x + (1.0 - torch.ones_like(x)) * -INF

    found = diagnose(in_place(tmp_path, training(biased)))[0]
    assert (found.op, found.fqn) == ("aten.mul.Tensor", "1")
    assert "writes" not in found.summary
