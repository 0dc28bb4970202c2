"""Clipped ratios of policies before the first optimizer step: off because of rounding, and off or 1 for other reasons."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor.diagnosis import diagnose

HALF = torch.bfloat16


def policy(dropout: float = 0.0) -> nn.Module:
    """A policy over 64 actions whose logits are large enough for bfloat16 to matter."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Dropout(dropout), nn.Linear(64, 64))
    nn.init.normal_(net[3].weight, std=1.0)
    return net


def clipped(new: Tensor, old: Tensor) -> Tensor:
    """PPO's loss."""
    ratio = (new - old).exp()
    return -torch.min(ratio, ratio.clamp(0.9, 1.1)).mean()


def clipped_in_logs(new: Tensor, old: Tensor) -> Tensor:
    """As in the libraries: the log-ratio is bounded before its exponential."""
    ratio = torch.clamp(new - old, -20, 20).exp()
    return -torch.min(ratio * 2, torch.clip(ratio, 0.8, 1.28) * 2).mean()


def not_clipped(new: Tensor, old: Tensor) -> Tensor:
    """The policy gradient, weighted by importance."""
    return -((new - old).exp() * torch.linspace(-1, 1, len(new)).unsqueeze(1)).mean()


def clipped_on_one_side(new: Tensor, old: Tensor) -> Tensor:
    """Bounded where the advantage's sign asks for it."""
    advantage, ratio = torch.linspace(-1, 1, len(new)).unsqueeze(1), (new - old).exp()
    bounded = torch.where(advantage > 0, ratio.clamp(max=1.2), ratio.clamp(min=0.8))
    return -torch.min(ratio * advantage, bounded * advantage).mean()


def of_sequences(new: Tensor, old: Tensor) -> Tensor:
    """GSPO's: the mean over a sequence's tokens, without padding, before the exponential."""
    mask = torch.ones(len(new) // 4, 4)
    ratio = (((new - old).view(-1, 4) * mask).sum(1) / mask.sum(1)).exp()
    return -torch.min(ratio, ratio.clamp(0.9997, 1.0004)).mean()


def by_hand(new: Tensor, old: Tensor) -> Tensor:
    """A softmax, whose exponential is of a difference too, with a largest value that is not trained."""
    return (new + old - (new + old).max().detach()).exp().clamp(0, 1).mean()


def train(net: nn.Module, sampler: torch.dtype | None, loss: Callable[[Tensor, Tensor], Tensor], *, far: float = 0.0,
          steps_before: int = 0) -> None:  # fmt: skip
    """One update: actions drawn without gradients in an autocast region (None: outside of any), then trained in float32."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x, y = torch.randn(32, 16), torch.randint(0, 64, (32, 1))
    for _ in range(steps_before):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), torch.autocast("cpu", dtype=sampler or HALF, enabled=sampler is not None):
        old = net(x).float().log_softmax(-1).gather(1, y) + far
    loss(net(x).log_softmax(-1).gather(1, y), old).backward()
    optimizer.step()


CASES = {
    "acts in bfloat16": (lambda: train(policy(), HALF, clipped), ["logprob-gap"]),
    "log-ratio bounded first": (lambda: train(policy(), HALF, clipped_in_logs), ["logprob-gap"]),
    "not clipped": (lambda: train(policy(), HALF, not_clipped), ["logprob-gap"]),
    "clipped on one side": (lambda: train(policy(), HALF, clipped_on_one_side), ["logprob-gap"]),
    "of sequences": (lambda: train(policy(), HALF, of_sequences), ["logprob-gap"]),
    "not clipped, the same on both sides": (lambda: train(policy(), None, not_clipped), []),
    "not clipped, already trained": (lambda: train(policy(), HALF, not_clipped, steps_before=1), []),
    "the same on both sides": (lambda: train(policy(), None, clipped), []),
    "drops at random": (lambda: train(policy(0.1), HALF, clipped), []),
    "another policy's actions": (lambda: train(policy(), HALF, clipped, far=1.0), []),
    "already trained": (lambda: train(policy(), HALF, clipped, steps_before=1), []),
    "no ratio": (lambda: train(policy(), HALF, by_hand), []),
}


@pytest.mark.release(all_but=3)
@pytest.mark.parametrize("case", CASES)
def test_a_ratio_is_told_where_rounding_alone_can_have_made_it(case: str, tmp_path: Path) -> None:
    """With identical weights and nothing random it compares two ways of computing; in every other case nothing is said of it."""
    work, expected = CASES[case]
    found = diagnose(watched(tmp_path, lambda _: work()))
    assert [finding.id for finding in found if finding.id == "logprob-gap"] == expected
    assert all("autocast" in " ".join(finding.evidence) for finding in found if finding.id == "logprob-gap")


@pytest.mark.parametrize("loss", [clipped, not_clipped])
def test_what_is_not_rounding_is_a_note(loss: Callable[[Tensor, Tensor], Tensor], tmp_path: Path) -> None:
    """Another temperature in float32: each ratio is off, and no dtype mends it."""
    [finding] = diagnose(watched(tmp_path, lambda _: train(policy(), None, loss, far=0.05)))
    assert (finding.id, finding.severity) == ("logprob-gap", "info")
    assert "not rounding" in finding.cause
