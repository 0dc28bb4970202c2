"""``dtypedoctor.apply``: fixes in a live model, by the names that reports and ``bisect`` print."""

import pytest
import torch
from torch import nn

import dtypedoctor
from dtypedoctor.errors import UsageError
from dtypedoctor.source_edits import TargetMismatchError


class Scaled(nn.Module):
    """Multiplies by 300, which float16 cannot hold for large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 300.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).square().mean(-1, keepdim=True).sqrt()


def overflowing() -> tuple[nn.Module, torch.Tensor]:
    """A float16 model in which an intermediate result overflows, and its input."""
    return nn.Sequential(nn.Identity(), nn.ModuleDict({"inner": Scaled()})["inner"]).half(), torch.full(
        (2, 4), 9.0
    ).half()


@pytest.mark.parametrize("fix", ["keep-float32:1", "keep-float32:model[1]", "keep-float32:1::self", "bfloat16"])
def test_a_fix_is_in_place_inside_of_the_block_only(fix: str) -> None:
    """Counted there; before and after it the same bits as without."""
    model, x = overflowing()
    assert model(x).isinf().all()
    with dtypedoctor.apply(model, fix) as applied:
        assert model(x).isfinite().all()
        assert applied.hits >= 1
        assert fix in repr(applied)
    assert model(x).isinf().all()
    assert all(parameter.dtype == torch.float16 for parameter in model.parameters())
    applied.undo()  # a second time: nothing


def test_a_name_may_be_as_short_as_a_report_shows_it() -> None:
    """As long as one module ends in it."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module(), nn.Module()])
    for layer in model.layers:
        layer.mlp = nn.Linear(2, 2).half()
    fix = dtypedoctor.apply(model, "keep-float32:1.mlp")
    assert [layer.mlp.weight.dtype for layer in model.layers] == [torch.float16, torch.float32]
    fix.undo()
    with pytest.raises(TargetMismatchError, match=r"several modules mlp; it may be layers.0.mlp, layers.1.mlp"):
        dtypedoctor.apply(model, "keep-float32:mlp")


def test_what_cannot_be_applied_is_refused_with_what_can() -> None:
    """The model stays as it is."""
    model, _ = overflowing()
    with pytest.raises(UsageError, match="did you mean 'keep-float32'"):
        dtypedoctor.apply(model, "keep-float23:1")
    with pytest.raises(UsageError, match="which modules"):
        dtypedoctor.apply(model, "keep-float32")
    with pytest.raises(UsageError, match=r"int is not a torch\.nn\.Module"):
        dtypedoctor.apply(3, "bfloat16")  # type: ignore[arg-type]


def test_modules_can_be_named_as_a_list() -> None:
    """The same as behind the colon of the text."""
    model, x = overflowing()
    with dtypedoctor.apply(model, "keep-float32", modules=["1"]) as applied:
        assert model(x).isfinite().all()
        assert applied.hits >= 1
