"""``scaled-gradients``: gradients that are used with the loss scale on them are told of, those that are used as torch's examples do are not."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Finding

Scaler = torch.amp.GradScaler
Body = Callable[[nn.Module, torch.optim.Optimizer, Scaler, Tensor], None]


def found(directory: Path, body: Body, *, enabled: bool = True, whole_batch: bool = False) -> list[Finding]:
    """What is found of five steps that end in ``body``, which gets the loss, of new rows in each step or of the same ones."""

    def work(_: object) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = Scaler("cpu", init_scale=1024.0, enabled=enabled)
        rows, labels = torch.randn(8, 8), torch.randint(0, 4, (8,))
        for _ in range(5):
            optimizer.zero_grad()
            if not whole_batch:
                rows, labels = torch.randn(8, 8), torch.randint(0, 4, (8,))
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(rows), labels)
            body(model, optimizer, scaler, loss)

    return [finding for finding in diagnose(watched(directory, work)) if finding.id == "scaled-gradients"]


def clipped_first(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, loss: Tensor) -> None:
    scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, loss: Tensor) -> None:
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def bounded_first(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, loss: Tensor) -> None:
    scaler.scale(loss).backward()
    clip_grad_value_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()


def clipped_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, loss: Tensor) -> None:
    """Clipping as programs write it themselves, for all parameters together."""
    scaler.scale(loss).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for parameter in model.parameters():
        parameter.grad.mul_(1.0 / norm)
    scaler.step(optimizer)
    scaler.update()


def scaled_twice(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, loss: Tensor) -> None:
    """The second time after other arithmetic."""
    loss = scaler.scale(loss) / 2
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def stepped_alone(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, loss: Tensor) -> None:
    scaler.scale(loss).backward()
    optimizer.step()


def unscaled_first(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, loss: Tensor) -> None:
    """As torch's documentation has it."""
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1e-3)
    scaler.step(optimizer)
    scaler.update()


def limit_scaled(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, loss: Tensor) -> None:
    scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), 0.1 * scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()


def averaged(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, loss: Tensor) -> None:
    """Gradients of several passes are averaged, which limits nothing, and are small by themselves."""
    for _ in range(2):
        scaler.scale(1e-4 * loss).backward(retain_graph=True)
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)
    scaler.step(optimizer)
    scaler.update()


def unscaled_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, loss: Tensor) -> None:
    """The program takes the scale off itself."""
    scaler.scale(loss).backward()
    for parameter in model.parameters():
        parameter.grad.div_(scaler.get_scale())
    clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def other_loss(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, loss: Tensor) -> None:
    other = nn.Linear(2, 2)
    second = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 2)).sum().backward()
    scaler.scale(loss).backward()
    second.step()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("body", "line", "says"),
    [
        (clipped_first, "clip_grad_norm_(model.parameters(), 1.0)", "clips gradients to 1 "),
        (bounded_first, "clip_grad_value_(", "clips gradients to 0.5"),
        (clipped_by_hand, "parameter.grad.mul_(1.0 / norm)", "clips gradients to 1 "),
        (scaled_twice, "scaler.scale(loss).backward()", "scaled already"),
        (stepped_alone, "optimizer.step()", "steps the optimizer"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_gradients_that_are_used_with_the_scale_on_them_are_found(
    tmp_path: Path, body: Body, line: str, says: str
) -> None:
    """Once, at the line that uses them."""
    (finding,) = found(tmp_path, body)
    number = int((finding.source or ":0").rpartition(":")[2])
    assert line in Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1]
    assert says in finding.summary
    assert "1,024" in finding.summary


def test_the_first_step_that_is_clipped_is_named(tmp_path: Path) -> None:
    """Several show that they are clipped; the first of them was, after its backward pass."""
    steps = count(1)

    def clipped_from_the_third_on(
        model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, loss: Tensor
    ) -> None:
        (clipped_first if next(steps) >= 3 else stepped)(model, optimizer, scaler, loss)

    (finding,) = found(tmp_path, clipped_from_the_third_on)
    assert (finding.step, finding.phase) == (3, "optimizer")


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("body", [clipped_first, clipped_by_hand], ids=lambda one: one.__name__)
def test_a_training_that_the_wrong_limit_stops_is_found(tmp_path: Path, body: Body) -> None:
    """With the same rows in each step, gradients hardly change, and neither does what they are multiplied by."""
    (finding,) = found(tmp_path, body, whole_batch=True)
    assert "clips gradients to 1 " in finding.summary


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    "body", [unscaled_first, limit_scaled, averaged, unscaled_by_hand, other_loss], ids=lambda one: one.__name__
)
def test_gradients_without_the_scale_are_not_told_of(tmp_path: Path, body: Body) -> None:
    """Limits that are small, averages and a program's own unscaling are no findings."""
    assert not found(tmp_path, body)


def clipped_one_by_one(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Scaler, loss: Tensor) -> None:
    """Each parameter's gradient by its own norm, as DINO's training does: a factor of 0 where that is inf."""
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    for parameter in model.parameters():
        factor = 3.0 / (parameter.grad.data.norm(2) + 1e-6)
        if factor < 1:
            parameter.grad.data.mul_(factor)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("skips", [True, False], ids=["skipped steps", "used steps"])
def test_gradients_of_skipped_steps_may_be_clipped_by_hand(tmp_path: Path, skips: bool) -> None:
    """0 times inf is NaN in a gradient that the scaler throws away; without a scaler a parameter gets it."""

    def work(_: object) -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = Scaler("cpu", init_scale=2.0**18, enabled=skips)
        for step in range(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(torch.randn(64, 8)).float().sum()
            clipped_one_by_one(model, optimizer, scaler, loss if skips or step else loss * float("inf"))

    found = {finding.id for finding in diagnose(watched(tmp_path, work))}
    assert bool(found - {"loss-scale-exhausted"}) is not skips
