"""Optimizer steps that change nothing are told of where they begin and end, with the reason; steps that change something otherwise are not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from watched import watched

from dtypedoctor.trace.records.silent import IdleSteps

NO_GRADIENT = "none of its parameters has a gradient"
NO_RATE = "its learning rate is 0"


def stepped(
    optimizer: Callable[[nn.Module], Any], steps: int = 6, after: Callable[[Any, int], None] | None = None
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    made = optimizer(layer)
    for step in range(steps):
        layer(torch.randn(8, 4)).square().mean().backward()
        made.step()
        layer.zero_grad()
        if after is not None:
            after(made, step)


class ByItself(torch.optim.Optimizer):
    """Moves parameters without their gradients or a learning rate, as evolution strategies do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(0.1 * torch.randn_like(parameter))


def copies() -> None:
    stepped(lambda layer: torch.optim.SGD([nn.Parameter(p.detach().clone()) for p in layer.parameters()], lr=0.1))


def rate_of_zero() -> None:
    stepped(lambda layer: torch.optim.AdamW(layer.parameters(), lr=0.0))


def scheduled_to_zero() -> None:
    def decay(optimizer: Any, step: int) -> None:
        optimizer.param_groups[0]["lr"] = max(0.0, 0.1 - 0.05 * (step + 1))

    stepped(lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1), after=decay)


def warmed_up() -> None:
    def warm(optimizer: Any, step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.1

    stepped(lambda layer: torch.optim.SGD(layer.parameters(), lr=0.0), after=warm)


def ordinary() -> None:
    stepped(lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1))


def by_itself() -> None:
    stepped(lambda layer: ByItself(layer.parameters()))


@pytest.mark.release(all_but=3)
@pytest.mark.parametrize(
    ("program", "told"),
    [
        (copies, [(1, True, NO_GRADIENT)]),
        (rate_of_zero, [(1, True, NO_RATE)]),
        (scheduled_to_zero, [(3, True, NO_RATE)]),
        (warmed_up, [(1, True, NO_RATE), (2, False, "")]),
        (ordinary, []),
        (by_itself, []),
    ],
)
def test_steps_that_change_nothing_are_told_with_the_reason(
    program: Callable[[], None], told: list[tuple[int, bool, str]], tmp_path: Path
) -> None:
    trace = watched(tmp_path, lambda _: program())
    assert [(idle.step, idle.what.is_idle, idle.what.reason) for idle in trace.observed(IdleSteps)] == told
