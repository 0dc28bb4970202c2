"""What overflows, or is rounded to 0, in code outside of modules and is finite again before anybody reads it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Severity


def trained_on(weigh: Callable[[Tensor], Tensor]) -> Callable[[object], None]:
    """A float32 training whose loss is weighted by something that is computed in half precision."""

    def work(_: object) -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for _ in range(2):
            x = torch.randn(32, 8)
            optimizer.zero_grad()
            (model(x).square().mean(1) * weigh(x[:, 0]).float() * 1e-4).mean().backward()
            optimizer.step()

    return work


def squares_replaced(x: Tensor) -> Tensor:
    return torch.nan_to_num((x * 500).half().square(), posinf=1.0)


def squares_masked(x: Tensor) -> Tensor:
    """The same, replaced where a test says so."""
    squares = (x * 500).half().square()
    return torch.where(squares.isinf(), torch.zeros_like(squares), squares)


def squares_masked_in_place(x: Tensor) -> Tensor:
    squares = (x * 500).half().square()
    squares[squares.isinf()] = torch.tensor(0.0)  # a number is written by other operators since torch 2.15
    return squares


def inverted(x: Tensor) -> Tensor:
    """The inverse of an infinity is 0; that of the number is not."""
    return 1 / ((x.abs() + 1) * 500).half().square() * 2**20


def divided_by_zero(x: Tensor) -> Tensor:
    """Products that float16 rounds to 0 are divided by."""
    return torch.nan_to_num(1 / ((x.half() * 1e-4) * 1e-4), posinf=0.0, neginf=0.0)


def normalized(x: Tensor) -> Tensor:
    """A variance of 1e-9 is 0, and so is the number that guards against it."""
    rewards = (x * 3e-5).half()
    return torch.nan_to_num((rewards - rewards.mean()) / (rewards.var().sqrt() + 1e-8), posinf=0.0, neginf=0.0)


def summed(x: Tensor) -> Tensor:
    """That some of the squares are rounded to 0 has nothing to do with the overflow of their sum."""
    squares = torch.cat([x * 80, x * 1e-5]).half().square()
    return 1 / squares.sum() + x


def other_branch(x: Tensor) -> Tensor:
    """Softplus by hand: where the exponential overflows, the other branch is taken."""
    wide = (x * 20).half()
    return torch.where(wide > 9, wide, torch.log1p(torch.exp(wide)))


def bounded(x: Tensor) -> Tensor:
    """What overflows is above the bound in float32 as well."""
    return (x * 500).half().square().clamp(max=100.0)


def masked(x: Tensor) -> Tensor:
    """An infinity that was asked for."""
    return x.half().masked_fill(x > 0.5, float("-inf")).softmax(0)


def equal(x: Tensor) -> Tensor:
    """The mean of equal numbers is off by its rounding in float32; what is left when it is subtracted says nothing."""
    rewards = torch.full_like(x, 0.1).half()
    return torch.nan_to_num((rewards - rewards.mean()) / rewards.std())


def entropy(x: Tensor) -> Tensor:
    """Probabilities of 0: nothing times the logarithm of nothing."""
    chances = (x * 30).half().softmax(0)
    return torch.nan_to_num(chances * chances.log())


def in_float32(x: Tensor) -> Tensor:
    """Nothing is in half precision."""
    return torch.nan_to_num((x * 500).square(), posinf=1.0)


FOUND = {
    squares_replaced: ["silent-rescue"],
    squares_masked: ["silent-rescue"],
    squares_masked_in_place: ["float16-overflow"],
    inverted: ["float16-overflow"],
    summed: ["float16-overflow"],
    divided_by_zero: ["rounds-out-of-domain"],
    normalized: ["rounds-out-of-domain"],
}
HEALTHY = (other_branch, bounded, masked, equal, entropy, in_float32)


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("weigh", [*FOUND, *HEALTHY], ids=lambda weigh: str(weigh.__name__))
def test_what_is_made_finite_again_is_found_where_float32_gives_something_else(
    weigh: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    """The operators in between are run beside the real ones; what gives the same in float32 is a note at most."""
    found = diagnose(watched(tmp_path, trained_on(weigh)))
    assert [one.id for one in found if one.severity is not Severity.INFO] == FOUND.get(weigh, [])
    assert all(one.proven_by is not None for one in found)


@pytest.mark.parametrize(
    ("dtype", "least", "ids"),
    [(torch.float32, 0.0, []), (torch.float64, 0.0, []), (torch.float16, 1e-9, ["rounds-out-of-domain"])],
)
def test_an_infinity_that_any_dtype_has_is_no_failure_of_a_table_that_is_printed(
    dtype: torch.dtype, least: float, ids: list[str], tmp_path: Path
) -> None:
    """The logarithm of a chance of 0 is one; that of a chance which half precision has rounded to 0 is not."""

    def work(_: object) -> None:
        chances = torch.tensor([least, 0.5, 0.5], dtype=dtype)
        print(chances.log().tolist(), chances.log().numpy())

    assert [one.id for one in diagnose(watched(tmp_path, work)) if one.severity is not Severity.INFO] == ids


COUNTS: dict[str, Callable[[Tensor], Tensor]] = {
    "counted": lambda ones: ones.half().sum(),
    "a number": lambda ones: torch.tensor(ones.numel(), dtype=torch.float16),
    "a length": lambda ones: torch.tensor(len(ones) * 1.0, dtype=torch.float16),
    "filled": lambda ones: torch.full((), ones.numel(), dtype=torch.float16),
    "cast": lambda ones: torch.tensor(ones.shape[0]).half(),
}
"""Counts of 80,000 in float16, which are inf; some of numbers that Python asks a tensor for."""


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_a_mean_whose_count_overflows_is_found_although_it_is_finite(
    count: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    """The loss is 0, and every gradient."""

    def work(_: object) -> None:
        model, ones = nn.Linear(8, 1), torch.ones(80_000)
        (model(torch.ones(4, 8)).square().sum() * 2e4 / count(ones)).backward()
        assert not any(parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)

    finding = next(one for one in diagnose(watched(tmp_path, work)) if one.severity is Severity.ERROR)
    assert finding.id == "float16-overflow"
    assert "80,000" in " ".join(finding.evidence)


def clipped_by_torch(parameters: list[nn.Parameter]) -> None:
    nn.utils.clip_grad_norm_(parameters, 1.0)


def clipped_by_hand(parameters: list[nn.Parameter]) -> None:
    """The norm of each, then that of all."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).norm()
    for gradient in gradients:
        gradient.mul_(1 / (norm + 1e-6))


def clipped_and_shown(parameters: list[nn.Parameter]) -> None:
    """The norm is read as a number, too."""
    assert nn.utils.clip_grad_norm_(parameters, 1.0).item() == float("inf")


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    "clip", [clipped_by_torch, clipped_by_hand, clipped_and_shown], ids=lambda clip: str(clip.__name__)
)
def test_a_norm_of_gradients_that_overflows_is_told_as_that(
    clip: Callable[[list[nn.Parameter]], None], tmp_path: Path
) -> None:
    """It is no norm inside of the model: clipping by it makes all gradients 0."""

    def work(_: object) -> None:
        torch.manual_seed(0)  # else the loss overflows, too, now and then
        model = nn.Linear(64, 64).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        (model(torch.ones(32, 64).half()) * 300).sum().backward()
        clip(list(model.parameters()))
        assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
        optimizer.step()

    [finding] = [one for one in diagnose(watched(tmp_path, work)) if one.severity is Severity.ERROR]
    assert finding.id == "norm-square-overflow"
    assert finding.summary.startswith("The norm of the gradients overflows float16 in step 1: ")
    assert "so the step trains nothing" in finding.cause


class Guarded(torch.autograd.Function):
    """A product whose backward replaces what overflows in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), torch.nan_to_num(x.t() @ gradient, 0.0, 0.0, 0.0)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("scale", "ids"), [(3e4, ["silent-rescue"]), (1.0, [])])
def test_gradients_that_a_custom_function_replaces_are_found(scale: float, ids: list[str], tmp_path: Path) -> None:
    """Its backward is the program's own code, and is followed as its forward is."""

    def work(_: object) -> None:
        torch.manual_seed(0)
        model, weight = nn.Linear(8, 8).half(), (torch.randn(8, 8) * 0.1).half().requires_grad_()
        product = Guarded.apply(model(torch.randn(32, 8).half()).detach(), weight)  # type: ignore[no-untyped-call]
        (product.float() * scale).sum().backward()

    found = [one for one in diagnose(watched(tmp_path, work)) if one.severity is not Severity.INFO]
    assert [(one.id, one.phase) for one in found] == [(name, "backward") for name in ids]


class Layer(nn.Module):
    """Multiplies by such a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(8, 8) * 0.1).half())

    def forward(self, x: Tensor) -> Tensor:
        return Guarded.apply(x, self.weight)  # type: ignore[no-untyped-call,no-any-return]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("scale", "ids"), [(3e4, ["silent-rescue"]), (1.0, [])])
def test_gradients_that_a_custom_function_of_a_module_replaces_are_found(
    scale: float, ids: list[str], tmp_path: Path
) -> None:
    """No gradient that leaves it is not finite, and no module runs: only its own operators show it, and only what was replaced is told."""

    def work(_: object) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Identity(), Layer())
        (model(torch.randn(32, 8).half()).float() * scale).sum().backward()

    found = [one for one in diagnose(watched(tmp_path, work)) if one.severity is not Severity.INFO]
    assert [(one.id, one.phase, one.fqn) for one in found] == [(name, "backward", "1") for name in ids]


def test_no_operator_of_another_library_is_run_again(tmp_path: Path) -> None:
    """It may do more than compute its result."""
    calls: list[int] = []

    @torch.library.custom_op("outside_overflows::squares", mutates_args=())
    def squares(x: Tensor) -> Tensor:
        calls.append(1)
        return x.square()

    watched(tmp_path, trained_on(lambda x: torch.nan_to_num(squares((x * 500).half()), posinf=1.0)))
    assert len(calls) == 2
