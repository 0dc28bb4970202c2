"""The experiment that tells overflowing attention scores from rows in which everything is masked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from observed import observed
from torch import Tensor, nn
from watched import watched

from dtypedoctor.trace.events import NotWatched, Observation, Op


class Attention(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor], drop: float = 0.0) -> None:
        super().__init__()
        self.between = between
        self.drop = nn.Dropout(drop)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        scores = self.between(query @ key.transpose(-1, -2))
        return self.drop(torch.softmax(scores, dim=-1)) @ value


def operands(size: float, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of two heads that share a direction of this length, and values."""
    torch.manual_seed(0)
    common = size * torch.nn.functional.normalize(torch.randn(16), dim=0)
    query, key, value = (torch.randn(1, 2, 6, 16) for _ in range(3))
    return (query + common).to(dtype), (key + common).to(dtype), value.to(dtype)


def experiments(directory: Path, model: nn.Module, *inputs: Tensor) -> list[Observation]:
    """What the op trace's experiments on attention say of one call."""
    trace = watched(directory, lambda _: model(*inputs), traced=True)
    assert not trace.all(NotWatched)
    found = observed(trace, "attention-replay")
    names = {op.n: op.op for op in trace.all(Op)}
    for one in found:
        assert names[one.values["scores"]] == "aten.bmm.default"
        assert names[one.values["softmax"]] == "aten._softmax.default"
    return found


def causal(scores: Tensor, hidden: float = -torch.inf) -> Tensor:
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores / 4).masked_fill(later, hidden)


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    "between",
    [
        lambda s: s / 4,
        causal,
        lambda s: s * 0.25 + torch.full((6, 6), -65504.0).triu(1).half(),
        lambda s: s.mul_(0.25).masked_fill_(torch.eye(6) > 2, -torch.inf),
        lambda s: torch.where(torch.eye(6) > 2, -torch.inf, s.float() / 4).half(),
    ],
    ids=["scale", "causal", "additive mask", "in place", "where and casts"],
)
def test_overflowing_scores_are_finite_in_fused_attention_with_the_same_scale_and_mask(
    tmp_path: Path, between: Callable[[Tensor], Tensor]
) -> None:
    """Whatever way the program scales and masks them."""
    (one,) = experiments(tmp_path, Attention(between, drop=0.1), *operands(400.0))
    assert one.values["nan_rows"] > 0
    assert one.values["unattended"] == 0
    assert one.values["scale"] == pytest.approx(0.25, rel=1e-3)
    assert all(one.values[name] for name in ("sdpa_finite", "exact_finite", "unmasked_finite"))


def test_the_fused_result_is_that_of_attention_in_float32(tmp_path: Path) -> None:
    """The mask and the scale that were found out are the program's."""
    query, key, value = operands(400.0)
    (one,) = experiments(tmp_path, Attention(causal), query, key, value)
    exact = Attention(causal)(query.float(), key.float(), value.float())
    assert one.values["sdpa_absmax"] == pytest.approx(float(exact.abs().max()), rel=2e-3)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_rows_in_which_everything_is_masked_are_nan_in_float32_too(tmp_path: Path, dtype: torch.dtype) -> None:
    """Without the mask they are finite, so it is the mask."""

    def padded(scores: Tensor) -> Tensor:
        return (scores / 4).masked_fill(torch.arange(6)[:, None] < 2, -torch.inf)

    (one,) = experiments(tmp_path, Attention(padded), *operands(2.0, dtype))
    assert (one.values["nan_rows"], one.values["unattended"]) == (4, 4)
    assert not one.values["exact_finite"]
    assert one.values["unmasked_finite"]


def test_attention_without_nan_and_scores_that_are_bent_on_the_way_are_left_alone(tmp_path: Path) -> None:
    """Nothing is wrong with the one; what the other does is no scale and no mask."""
    for name, model, size in (
        ("healthy", Attention(causal), 2.0),
        ("bent", Attention(lambda s: torch.where(s.isinf(), s, 50 * torch.tanh(s / 50))), 400.0),
    ):
        folder = tmp_path / name
        folder.mkdir()
        assert experiments(folder, model, *operands(size)) == []


def test_a_classifier_in_front_of_a_softmax_is_no_attention(tmp_path: Path) -> None:
    """One of the factors is a weight."""
    model = nn.Sequential(nn.Linear(16, 8, bias=False).half(), nn.Softmax(-1))
    x = torch.full((6, 16), 60000.0).half()
    assert experiments(tmp_path, model, x) == []
