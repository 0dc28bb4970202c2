"""Requires a training step without findings; the first test fails, and says why beside its traceback."""

import pytest
import torch
from torch import nn


def step(dtype: torch.dtype) -> torch.Tensor:
    """Make one step of a small model and return its loss."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = (300 * model(torch.ones(4, 8, dtype=dtype))).square().sum()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.no_dtype_findings
def test_a_step_in_float16() -> None:
    """It overflows."""
    step(torch.float16)


@pytest.mark.no_dtype_findings
def test_a_step_in_float32() -> None:
    """It does not."""
    assert step(torch.float32).isfinite()
