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


class Narrow(torch.optim.Optimizer):
    """Float32 weights, and a mean of squared gradients in half precision that is computed in float32 and stored anew."""

    def __init__(self, parameters: Any, dtype: torch.dtype, begin: float) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.means = {p: torch.full_like(p, begin, dtype=dtype) for p in self.param_groups[0]["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, mean in self.means.items():
            wide = mean.float() * 0.999 + 0.001 * p.grad.square()
            self.means[p] = wide.to(mean.dtype)
            p.addcdiv_(p.grad, wide.sqrt() + 1e-6, value=-1e-2)


class RoundedBeta(torch.optim.Optimizer):
    """RMSprop whose decay is a tensor of the parameters' dtype: bfloat16 makes 1 of 0.999."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2, "beta": 0.999})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                beta = self.param_groups[0]["beta"]
                state["v"], state["beta"] = torch.ones_like(p), torch.tensor(beta, dtype=p.dtype)
            state["v"].mul_(state["beta"]).add_(p.grad.square() * (1 - state["beta"]))
            p.sub_(1e-2 * p.grad / (state["v"].sqrt() + 1e-3))


def rounded_number() -> None:
    """An average that a number of Python's would move."""
    model = nn.Linear(16, 16).to(HALF)
    trains(model, RoundedBeta(model.parameters()), 6)


def steps_counted() -> None:
    """An optimizer that is not the first one counts its steps in bfloat16."""
    model = nn.Linear(16, 16)
    trains(model, torch.optim.SGD(model.parameters(), lr=1e-3), 30)
    second = torch.optim.Adam(model.parameters(), lr=1e-3)
    trains(model, second, 1)
    for state in second.state.values():
        state["step"] = torch.tensor(254.0).to(HALF)
    trains(model, second, 20)


def running_statistics() -> None:
    """Batch norm moves its mean by less than half of the spacing of bfloat16."""
    norm = nn.BatchNorm1d(8, momentum=0.004).to(HALF)
    with torch.no_grad():
        for _ in range(400):
            norm((torch.randn(32, 8) * 3 + 5).to(HALF))


def running_statistics_that_arrive() -> None:
    """The same with the momentum that batch norm has by default."""
    norm = nn.BatchNorm1d(8).to(HALF)
    with torch.no_grad():
        for _ in range(100):
            norm((torch.randn(32, 8) * 3 + 5).to(HALF))


def narrow_state() -> None:
    """A mean of squares that no longer moves in bfloat16."""
    model = nn.Linear(16, 16)
    trains(model, Narrow(model.parameters(), HALF, 4.0), 6)


def flushed_state() -> None:
    """A mean of squares that are all below the smallest float16."""
    model = nn.Linear(16, 16)
    trains(model, Narrow(model.parameters(), torch.float16, 0.0), 6, 1e-2)


def half_of_the_way() -> None:
    """An average that follows where its values are small, and loses most of its way elsewhere."""
    weights = 1 + torch.randn(2048) / 2
    average = weights.to(HALF)
    for _ in range(60):
        weights = weights + 0.02 * torch.randn(2048)
        average.lerp_(weights.to(HALF), 0.01)


def histogram() -> None:
    """Counts at an index, which torch reads, adds to, and puts back."""
    counts = torch.full((4,), 250.0).to(HALF)
    for number in range(120):
        counts[torch.tensor([number % 4])] += 1


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


def running_average() -> None:
    """A matrix that is mostly on its diagonal, averaged over batches: the average loses a fifth."""
    total = torch.zeros(64, 64, dtype=HALF)
    for number in range(1, 400):
        rows = 0.3 * torch.randn(4, 64) * (0.5 + number / 200)
        total *= (number - 1) / number
        total += (rows.t() @ rows / number).to(HALF)


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


def delta(scale: float = 0.02) -> Tensor:
    """What an adapter adds."""
    return scale * torch.randn(64, 4) @ torch.randn(4, 64) * scale


def layer() -> nn.Linear:
    """A layer that has been called, with weights whose spacing is larger than what is merged into them."""
    model = nn.Linear(64, 64).to(HALF)
    with torch.no_grad():
        model.weight.uniform_(1.0, 2.0)
        model(torch.randn(2, 64).to(HALF))
    return model


def decayed() -> None:
    """Weights that decay by two thousandths a step, which is rounded away, and are rounded at random in the rest of the step."""
    weight = 1 + torch.rand(64).to(HALF)
    for _ in range(60):
        weight.mul_(1 - 0.0018)
        wide = (weight.float() - 1e-4 * torch.randn(64)).view(torch.int32)
        weight.copy_(((wide + torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32)) & -65536).view(torch.float32))


def decayed_by_optimizer() -> None:
    """Weights of which a half has no gradient: the decay of an optimizer of torch is to make these small."""
    model = nn.Linear(16, 8, bias=False).to(HALF)
    nn.init.uniform_(model.weight, 0.5, 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(120):
        rows = torch.cat([torch.randn(32, 8), torch.zeros(32, 8)], 1)
        optimizer.zero_grad()
        (model(rows.to(HALF)).float() - 2 * rows[:, :8]).square().mean().backward()
        optimizer.step()


def merge_first() -> None:
    """A merge before the model is called for the first time."""
    model = nn.Linear(64, 64).to(HALF)
    with torch.no_grad():
        model.weight.uniform_(1.0, 2.0)
        model.weight.data += delta().to(HALF)
        model(torch.randn(2, 64).to(HALF))


def merge_anew() -> None:
    """The sum takes the place of the weight."""
    model = layer()
    model.weight.data = model.weight.data + delta().to(HALF)
    model(torch.randn(2, 64).to(HALF))


def merge_wide() -> None:
    """It is computed in float32, and becomes another parameter."""
    model = layer()
    wide = model.weight.data.float() + delta()
    model.weight = nn.Parameter(wide.to(HALF))
    model(torch.randn(2, 64).to(HALF))


def merge_loaded() -> None:
    """It is computed of a checkpoint and loaded then."""
    state = {"weight": (torch.rand(64, 64) + 1).to(HALF), "bias": torch.zeros(64).to(HALF)}
    state["weight"] = state["weight"] + delta().to(HALF)
    nn.Linear(64, 64).to(HALF).load_state_dict(state)


def merge_product() -> None:
    """The product is added by the operator that makes it."""
    model = layer()
    with torch.no_grad():
        model.weight.addmm_(0.02 * torch.randn(64, 4).to(HALF), 0.02 * torch.randn(4, 64).to(HALF))


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


def decay_beside_a_step() -> None:
    """Weights that an optimizer moves, and a decay by hand that half precision has no room for."""
    model = nn.Linear(32, 8, bias=False).to(HALF)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(8):
        with torch.no_grad():
            model.weight.mul_(1 - 1e-4)
        model(torch.randn(4, 32).to(HALF)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def measured() -> None:
    """Weights whose distance from the first ones is measured: it has the error of the weights, and keeps nothing of it."""
    weight = torch.ones(64, dtype=HALF)
    first = weight.clone()
    for _ in range(6):
        weight -= 1e-5 * torch.randn(64).to(HALF)
        distance = weight - first
        assert float(distance.abs().max()) == 0.0


@pytest.mark.release(all_but=6)
@pytest.mark.parametrize(
    ("work", "id", "line"),
    [
        (measured, "update-stall", "weight -= 1e-5 * torch.randn(64)"),
        (decay_beside_a_step, "update-stall", "model.weight.mul_(1 - 1e-4)"),
        (stuck_count, "rounded-sum", 'totals["seen"] += 1'),
        (second_moment, "update-stall", "moment.mul_(0.999)"),
        (second_moments_on_lists, "update-stall", "torch._foreach_mul_(moments"),
        (state_of_an_optimizer, "update-stall", 'state["v"].mul_(0.999)'),
        (buffer_anew, "update-stall", "self.mean = 0.9995 * self.mean"),
        (average_with_out, "update-stall", "torch.lerp(average"),
        (through_float32, "update-stall", "average.copy_(wide)"),
        (merge, "update-stall", "model.weight += (low @ high)"),
        (by_hand, "update-stall", "weight -= 1e-5 * weight.grad"),
        (rounded_number, "update-stall", 'state["v"].mul_(state["beta"])'),
        (steps_counted, "rounded-sum", "optimizer.step()"),
        (running_statistics, "rounded-result", "norm((torch.randn(32, 8) * 3 + 5)"),
        (narrow_state, "update-stall", "wide.to(mean.dtype)"),
        (flushed_state, "update-stall", "wide.to(mean.dtype)"),
        (half_of_the_way, "update-stall", "average.lerp_(weights"),
        (running_average, "rounded-result", "total *= (number - 1)"),
        (histogram, "update-stall", "counts[torch.tensor"),
        (decayed, "update-stall", "weight.mul_(1 - 0.0018)"),
        (decayed_by_optimizer, "update-stall", "optimizer.step()"),
        (merge_first, "update-stall", "model.weight.data += delta()"),
        (merge_anew, "update-stall", "model.weight.data + delta()"),
        (merge_wide, "update-stall", "model.weight = nn.Parameter(wide"),
        (merge_loaded, "update-stall", 'state["weight"] + delta()'),
        (merge_product, "update-stall", "model.weight.addmm_"),
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


def barely_moved() -> None:
    """A bound and a small number that are added in place again and again to what has just been computed, and change nothing."""
    scale = torch.ones(64).to(HALF)
    for _ in range(40):
        scale.copy_(1 + torch.rand(64))
        scale.add_(1e-6).clamp_(max=4)


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


def converges() -> None:
    """Averages that get as near to what they average as their dtype allows."""
    fixed, averages = torch.randn(256).to(HALF), [torch.zeros(256).to(HALF) for _ in range(2)]
    for _ in range(60):
        averages[0].lerp_(fixed, 0.5)
        averages[1].lerp_(fixed + 0.1 * torch.randn(256).to(HALF), 0.3)


def merges_that_arrive() -> None:
    """What is merged is larger than the spacing; and a residual stream, which nobody merges."""
    model = layer()
    model.weight.data = model.weight.data + delta(0.3).to(HALF)
    rows = model(torch.randn(64, 64).to(HALF)).detach() + 1
    for _ in range(4):
        rows = rows + delta(0.01).to(HALF)
    rows += delta(0.01).to(HALF)
    model(rows)


def narrow_and_moving() -> None:
    """Momentum in bfloat16 beside float32 weights."""
    model = nn.Linear(16, 16)
    momenta = {p: torch.zeros_like(p, dtype=HALF) for p in model.parameters()}
    for _ in range(40):
        model(torch.randn(8, 16)).square().mean().backward()
        with torch.no_grad():
            for p, momentum in momenta.items():
                momentum.mul_(0.9).add_(p.grad.to(HALF))  # type: ignore[union-attr]
                p -= 1e-2 * momentum
                p.grad = None


def compensation_in_place() -> None:
    """A step by hand in a loop, and what each parameter loses by it in a tensor beside it."""
    model = nn.Linear(16, 8).to(HALF)
    lost = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
    for _ in range(8):
        model(torch.randn(8, 16).to(HALF)).float().square().mean().backward()
        with torch.no_grad():
            for parameter, rest in lost.items():
                change = -1e-4 * parameter.grad - rest  # type: ignore[operator]
                moved = parameter + change
                rest.copy_((moved - parameter) - change)
                parameter.copy_(moved)
                parameter.grad = None  # type: ignore[assignment]


@pytest.mark.release(all_but=4)
@pytest.mark.parametrize(
    "work",
    [
        compensation_in_place,
        converges,
        merges_that_arrive,
        narrow_and_moving,
        running_statistics_that_arrive,
        useful_rate,
        at_random,
        barely_moved,
        error_feedback,
        wider,
        temporaries,
        settled,
    ],
)
def test_state_that_is_as_it_should_be_is_not_told_of(tmp_path: Path, work: Callable[[], object]) -> None:
    """It moves, keeps what it loses, or has nowhere to go."""
    assert told_of(tmp_path, work) == []


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("steps", "found"), [(160, ["rounded-sum"]), (80, [])], ids=["stuck", "exact"])
def test_a_count_that_sticks_is_found_where_few_steps_are_looked_at(
    tmp_path: Path, steps: int, found: list[str]
) -> None:
    """It has changed between two looks, unseen, or has not; what a look sees of it is enough."""

    def work(_: object) -> None:
        model, count = nn.Linear(4, 4), torch.full((), 128.0).to(HALF)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            count += 1

    findings = diagnose(watched(tmp_path, work, every=8))
    assert [finding.id for finding in findings if finding.id in IDS] == found
