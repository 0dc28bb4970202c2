"""State in half precision of each kind, in each way that programs change it: what does not go where float64 takes it is told of, and nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Finding

HALF = torch.bfloat16
IDS = ("update-stall", "rounded-sum", "rounded-result", "optimizer-epsilon-underflow", "gradient-underflow")


def told_of(directory: Path, work: Callable[[], object]) -> list[Finding]:
    """What is found of state."""
    torch.manual_seed(0)
    return [finding for finding in diagnose(watched(directory, lambda _: work())) if finding.id in IDS]


def line_of(finding: Finding) -> str:
    """The line of this file that a finding names."""
    number = int((finding.source or ":0").rpartition(":")[2])
    return Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1]


def trains(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, scale: float = 1.0) -> None:
    """Small regression."""
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(8, 16).to(dtype)).float().square().mean() * scale).backward()
        optimizer.step()


def stuck_count() -> None:
    """Samples are counted in a dictionary, and float16 has no 2,049."""
    totals = {"seen": torch.tensor(2048.0).half()}
    for _ in range(4):
        totals["seen"] += 1


def second_moment() -> None:
    """Adam's second moment by hand, beside gradients that have become small."""
    moment = torch.full((64, 8), 0.5).to(HALF)
    for _ in range(5):
        gradient = 0.1 * torch.randn(64, 8).to(HALF)
        moment.mul_(0.999).addcmul_(gradient, gradient, value=0.001)


def second_moments_on_lists() -> None:
    """The same on lists, held by a class."""
    moments = [torch.full((32, 8), 0.5).to(HALF) for _ in range(3)]
    for _ in range(5):
        gradients = [0.1 * torch.randn(32, 8).to(HALF) for _ in moments]
        torch._foreach_mul_(moments, 0.999)
        torch._foreach_addcmul_(moments, gradients, gradients, value=0.001)


class Own(torch.optim.Optimizer):
    """Adam with moments in the dtype of the parameters, of which the second has been through many steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["v"] = torch.full_like(p, 4.0)
            state["v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            p.addcdiv_(p.grad, state["v"].sqrt().add_(1e-6), value=-self.param_groups[0]["lr"])


def state_of_an_optimizer() -> None:
    """The parameters move."""
    model = nn.Linear(16, 16).to(HALF)
    trains(model, Own(model.parameters()), 6)


class Averaged(nn.Module):
    """Centers rows by a mean in a buffer that it computes anew, beside a compiled layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(128))
        self.layer = torch.compile(nn.Linear(128, 128), backend="eager")

    def forward(self, rows: Tensor) -> Tensor:
        """Moves the mean on."""
        self.mean = 0.9995 * self.mean + 0.0005 * rows.mean(0)
        return self.layer(rows - self.mean)


def buffer_anew() -> None:
    """A buffer that another tensor takes the place of."""
    model = Averaged().to(HALF)
    with torch.no_grad():
        for _ in range(6):
            model(torch.randn(16, 128).to(HALF))


def average_with_out() -> None:
    """An average that is written by ``out=``."""
    average = torch.ones(256).to(HALF)
    for _ in range(6):
        torch.lerp(average, torch.randn(256).to(HALF), 1e-4, out=average)


def through_float32() -> None:
    """An average that is computed in float32, and kept in bfloat16."""
    averages = [torch.ones(128).to(HALF) for _ in range(3)]
    for _ in range(6):
        for average in averages:
            wide = average.float() * 0.9999 + torch.randn(128) * 1e-4
            average.copy_(wide)


def merge() -> None:
    """Three quarters of what an adapter adds is rounding."""
    model = nn.Linear(64, 64).to(HALF)
    with torch.no_grad():
        model.weight.uniform_(1.0, 2.0)
        model(torch.randn(2, 64).to(HALF))
        low, high = 0.03 * torch.randn(64, 4), 0.03 * torch.randn(4, 64)
        model.weight += (low @ high).to(HALF)


def by_hand() -> None:
    """Weights in a dictionary, stepped by the program."""
    weights = {"w": torch.randn(32, 8).to(HALF).requires_grad_(), "v": torch.randn(8, 64).to(HALF).requires_grad_()}
    for _ in range(5):
        loss = (torch.randn(4, 32).to(HALF) @ weights["w"] @ weights["v"]).float().square().mean()
        loss.backward()
        with torch.no_grad():
            for weight in weights.values():
                weight -= 1e-5 * weight.grad
                weight.grad = None


def measured() -> None:
    """Weights whose distance from the first ones is measured: it has the error of the weights, and keeps nothing of it."""
    weight = torch.ones(64, dtype=HALF)
    first = weight.clone()
    for _ in range(6):
        weight -= 1e-5 * torch.randn(64).to(HALF)
        distance = weight - first
        assert float(distance.abs().max()) == 0.0


@pytest.mark.parametrize(
    ("work", "id", "line"),
    [
        (measured, "update-stall", "weight -= 1e-5 * torch.randn(64)"),
        (stuck_count, "rounded-sum", 'totals["seen"] += 1'),
        (second_moment, "update-stall", "moment.mul_(0.999)"),
        (second_moments_on_lists, "update-stall", "torch._foreach_mul_(moments"),
        (state_of_an_optimizer, "update-stall", 'state["v"].mul_(0.999)'),
        (buffer_anew, "update-stall", "self.mean = 0.9995 * self.mean"),
        (average_with_out, "update-stall", "torch.lerp(average"),
        (through_float32, "update-stall", "wide = average.float()"),
        (merge, "update-stall", "model.weight += (low @ high)"),
        (by_hand, "update-stall", "weight -= 1e-5 * weight.grad"),
    ],
)
def test_state_that_does_not_go_where_float64_takes_it_is_found(
    tmp_path: Path, work: Callable[[], object], id: str, line: str
) -> None:
    """Once, at the line that changes it."""
    (finding,) = told_of(tmp_path, work)
    assert finding.id == id
    assert line in line_of(finding)


def useful_rate() -> None:
    """bfloat16 weights, and the state of the optimizer, that move as they should."""
    for make in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop):
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(HALF)
        trains(model, make(model.parameters(), lr=1e-2), 8)


def at_random() -> None:
    """Weights that are rounded to both sides by a random number, in bits and as a fraction."""
    weights = [torch.randn(64, 8).to(HALF) for _ in range(2)]
    for _ in range(8):
        exact = weights[0].float() - 1e-4 * torch.randn(64, 8)
        bits = exact.view(torch.int32) + torch.randint(0, 1 << 16, exact.shape, dtype=torch.int32)
        weights[0].copy_((bits & -65536).view(torch.float32))
        spacing = torch.ldexp(torch.ones(64, 8), torch.frexp(weights[1].float())[1] - 8)
        noise = (torch.rand(64, 8) - 0.5) * spacing
        weights[1].copy_(weights[1].float() - 1e-4 * torch.randn(64, 8) + noise)


def error_feedback() -> None:
    """Gradients are sent as signs, and what these leave out is added to the next."""
    rest = torch.zeros(256).to(HALF)
    for _ in range(8):
        gradient = torch.randn(256).to(HALF) + rest
        sent = gradient.sign() * gradient.abs().mean()
        rest.copy_(gradient - sent)


def wider() -> None:
    """A float32 average and float32 weights of bfloat16 ones."""
    model = nn.Linear(16, 16).to(HALF)
    average = {name: p.detach().float() for name, p in model.named_parameters()}
    masters = [p.detach().float() for p in model.parameters()]
    for _ in range(8):
        model(torch.randn(4, 16).to(HALF)).float().square().mean().backward()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                master -= 1e-5 * p.grad.float()  # type: ignore[union-attr]
                p.copy_(master)
                p.grad = None
            for name, p in model.named_parameters():
                average[name].lerp_(p.float(), 1e-3)


def temporaries() -> None:
    """Guards against a division by 0, a decayed mask, noise."""
    for _ in range(8):
        rows = torch.rand(8, 64).to(HALF) + 1
        rows.add_(1e-8)
        rows = rows / rows.norm(dim=-1, keepdim=True).add_(1e-6)
        rows.mul_(1.0001)


def settled() -> None:
    """An average of what does not change, a count below 256, a learning rate of 0."""
    constant, average, count = torch.ones(64, 2).to(HALF), torch.ones(64, 2).to(HALF), torch.zeros(3).to(HALF)
    weight = torch.randn(64, 2).to(HALF)
    for _ in range(20):
        average.lerp_(constant, 1e-3)
        count += 1
        weight -= 0.0 * constant


@pytest.mark.parametrize("work", [useful_rate, at_random, error_feedback, wider, temporaries, settled])
def test_state_that_is_as_it_should_be_is_not_told_of(tmp_path: Path, work: Callable[[], object]) -> None:
    """It moves, keeps what it loses, or has nowhere to go."""
    assert told_of(tmp_path, work) == []
