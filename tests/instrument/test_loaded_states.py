"""States of more bits than the parameters that they are loaded into: what becomes of them decides."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor.diagnosis import diagnose

BF16 = torch.bfloat16
STATE = {"weight": torch.linspace(-1, 1, 64).reshape(8, 8) / 3, "bias": torch.linspace(0, 1, 8) / 7}


def step(*trained: Tensor, through: Callable[[Tensor], Tensor]) -> None:
    optimizer = torch.optim.SGD(trained, lr=0.5)
    through(torch.ones(4, 8, dtype=BF16)).float().square().mean().backward()
    optimizer.step()


def loaded(state: dict[str, Tensor], *, assign: bool = False) -> nn.Linear:
    layer = nn.Linear(8, 8).to(BF16)
    layer.load_state_dict({name: value.clone() for name, value in state.items()}, assign=assign)
    return layer


def train_it() -> None:
    """The optimizer steps on the rounded values."""
    layer = loaded(STATE)
    step(*layer.parameters(), through=layer)


def ask_it() -> None:
    """Only what is behind the layer is trained."""
    layer, head = loaded(STATE).requires_grad_(requires_grad=False), nn.Linear(8, 1).to(BF16)
    step(*head.parameters(), through=lambda x: head(layer(x)))


def train_what_fits() -> None:
    """bfloat16 holds every value of the state."""
    layer = loaded({name: value.to(BF16).float() for name, value in STATE.items()})
    step(*layer.parameters(), through=layer)


def train_what_was_assigned() -> None:
    """Nothing is cast: the parameters are the tensors of the state."""
    layer = loaded(STATE, assign=True)
    step(*layer.parameters(), through=lambda x: layer(x.float()))


CASES = [(train_it, ["checkpoint-dtype-mismatch"]), (ask_it, []), (train_what_fits, []), (train_what_was_assigned, [])]


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(("work", "expected"), CASES, ids=[work.__name__ for work, _ in CASES])
def test_rounded_parameters_are_told_of_where_they_are_trained(
    work: Callable[[], None], expected: list[str], tmp_path: Path
) -> None:
    """Not where they are frozen, where nothing was rounded, or where the layer has taken over the tensors themselves."""
    found = diagnose(watched(tmp_path, lambda _: work()))
    assert [finding.id for finding in found if finding.id == "checkpoint-dtype-mismatch"] == expected
