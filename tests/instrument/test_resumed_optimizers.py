"""The state with which an optimizer goes on after a checkpoint: what it has lost on the way is told of where it is stepped with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor.diagnosis import diagnose


def trained(layer: nn.Module, optimizer: torch.optim.Optimizer, size: float = 1e-5) -> None:
    """Three steps on gradients of about this size, of which the squares are below what float16 holds."""
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(16, 8).to(next(layer.parameters()).dtype)
        (layer(x).float().square().mean() * size).backward()
        optimizer.step()


def resumed(
    through: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32, size: float = 1e-5, **options: Any
) -> tuple[Any, Any]:
    """A layer and an Adam with the state of another one, each tensor of which went ``through`` something."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)
    first = torch.optim.Adam(layer.parameters(), **options)
    trained(layer, first, size)
    saved = first.state_dict()
    state = {number: {key: through(value) for key, value in held.items()} for number, held in saved["state"].items()}
    layer = layer.to(dtype)
    second = torch.optim.Adam(layer.parameters(), **options)
    second.load_state_dict({"state": state, "param_groups": saved["param_groups"]})
    return layer, second


def stored_in_float16() -> None:
    """The checkpoint holds float16."""
    trained(*resumed(Tensor.half))


def stored_in_float16_and_cast_back() -> None:
    """The program casts it back before it loads it."""
    trained(*resumed(lambda value: value.half().float()))


def stored_in_float16_with_a_maximum() -> None:
    """AMSGrad has a second mean of squares."""
    trained(*resumed(Tensor.half, amsgrad=True))


def beyond_float16() -> None:
    """Squares of large gradients become inf."""
    trained(*resumed(Tensor.half, size=1e6))


def loaded_into_bfloat16() -> None:
    """torch casts the state to the dtype of the parameters."""
    trained(*resumed(Tensor.clone, torch.bfloat16))


def stored_in_float32() -> None:
    """Nothing is cast."""
    trained(*resumed(Tensor.clone))


def stored_in_bfloat16() -> None:
    """The range is that of float32, so nothing becomes zero."""
    trained(*resumed(Tensor.bfloat16))


def stored_in_float16_and_never_used() -> None:
    """No step follows."""
    resumed(Tensor.half)


def second_moments_reset() -> None:
    """A program forgets them on purpose, in float32."""
    trained(*resumed(lambda value: torch.zeros_like(value) if bool((value >= 0).all()) else value))


def large_enough_for_float16() -> None:
    """Every square is within the range."""
    trained(*resumed(Tensor.half, size=100.0))


LOST = (
    stored_in_float16,
    stored_in_float16_and_cast_back,
    stored_in_float16_with_a_maximum,
    beyond_float16,
    loaded_into_bfloat16,
)
KEPT = (
    stored_in_float32,
    stored_in_bfloat16,
    stored_in_float16_and_never_used,
    second_moments_reset,
    large_enough_for_float16,
)


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("work", [*LOST, *KEPT], ids=lambda work: str(work.__name__))
def test_state_that_lost_something_is_told_of(work: Callable[[], None], tmp_path: Path) -> None:
    """Small squares become 0 in float16, large ones inf, and torch casts to the dtype of the parameters; other checkpoints lose nothing that matters."""
    found = [f.id for f in diagnose(watched(tmp_path, lambda _: work())) if f.id == "checkpoint-dtype-mismatch"]
    assert found == (["checkpoint-dtype-mismatch"] if work in LOST else [])


def test_loading_is_as_before_once_the_instruments_are_gone(tmp_path: Path) -> None:
    """The method of the optimizer is the one that was there."""
    original = torch.optim.Optimizer.load_state_dict
    watched(tmp_path, lambda _: None)
    assert torch.optim.Optimizer.load_state_dict is original
