"""Numbers put in place of NaN outside of modules: an infinity that has spread is told, a NaN of its own element is not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from watched import watched

from dtypedoctor.diagnosis import diagnose

INF = float("inf")


def standardized(rewards: Tensor) -> Tensor:
    """Advantages within each group."""
    return (rewards - rewards.mean(1, keepdim=True)) / rewards.std(1, keepdim=True)


def by_index(values: Tensor) -> Tensor:
    """In place."""
    values[values.isnan()] = 0.0
    return values


REPLACEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nan_to_num": lambda values: values.nan_to_num(),
    "where": lambda values: torch.where(values.isnan(), 0.0, values),
    "masked_fill": lambda values: values.masked_fill(values.isnan(), 0.0),
    "by index": by_index,
    "left out of a mean": lambda values: values.nanmean(),
}


def given(*, worst: float) -> Tensor:
    """Rewards of 4 groups of 8, one of which has failed."""
    torch.manual_seed(0)
    rewards = torch.rand(4, 8)
    rewards[2, 5] = worst
    return rewards


def failing(scores: Tensor) -> Tensor:
    """Rewards that are the logarithm of something which is 0 for one of them."""
    scores[1, 1] = 0.0
    return scores.log()


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("how", REPLACEMENTS)
def test_finite_values_that_are_lost_with_an_infinity_are_told(how: str, tmp_path: Path) -> None:
    """However the NaN are replaced, and whether the infinity was given or computed."""
    for name, rewards in (("given", lambda: given(worst=-INF)), ("computed", lambda: failing(given(worst=0.5)))):
        folder = tmp_path / name
        folder.mkdir()
        trace = watched(folder, lambda _, rewards=rewards: float(REPLACEMENTS[how](standardized(rewards())).sum()))
        [found] = [finding for finding in diagnose(trace) if finding.id == "silent-rescue"]
        assert "replaces 8 NaN that 1 infinity made of a whole group: 7 finite values are lost" in found.summary
        assert str(found.source).startswith("test_erased_values.py")


HEALTHY: dict[str, Callable[[], Tensor]] = {
    "a finite penalty": lambda: standardized(given(worst=-10.0)).nan_to_num(),
    "0/0 of equal rewards": lambda: standardized(torch.ones(4, 8)).nan_to_num(),
    "0 times its logarithm": lambda: (x := torch.tensor([0.0, 0.5, 1.0])).log().mul(x).nan_to_num(),
    "missing measurements": lambda: torch.tensor([1.0, float("nan"), 2.0]).nan_to_num().exp(),
    "rows that are masked as a whole": lambda: torch.full((2, 4), -INF).softmax(-1).nan_to_num(),
}


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("what", HEALTHY)
def test_nan_that_only_their_own_elements_made_may_be_replaced(what: str, tmp_path: Path) -> None:
    """Nothing finite is lost."""
    trace = watched(tmp_path, lambda _: float(HEALTHY[what]().sum()))
    assert [finding.id for finding in diagnose(trace) if finding.id == "silent-rescue"] == []
