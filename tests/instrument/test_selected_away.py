"""Rows that a module returns as NaN: none of its failures where the caller leaves them out, and told where any of them is used."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_in_place import in_place
from torch import Tensor, nn

from dtypedoctor.analysis import diagnose
from dtypedoctor.diagnosis.rule import Severity


class Mean(nn.Module):
    """Of what a mask leaves of each row: nothing of the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class Attention(nn.Module):
    """Each position of a row attends to those that are there; a position that is not has none."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        there = mask.bool()[:, None] & mask.bool()[:, :, None]
        return (x @ x.mT).masked_fill(~there, -torch.inf).softmax(-1)[:, 0] @ x[0]


class Squares(nn.Module):
    """Leaves the range of float16, where float32 does not."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        large = x.half() * torch.where(mask[..., None] > 0, 1.0, 300.0).half()
        return (large * large).sum(1)


def left_out(out: Tensor, there: Tensor) -> Tensor:
    return out[there].mean() + torch.where(there[:, None], out, 0.0).sum() + out.nan_to_num().sum()


def marked(out: Tensor, there: Tensor) -> Tensor:
    return torch.where(there[:, None], out, torch.nan).nanmean()


def decides(out: Tensor, there: Tensor) -> Tensor:
    return out.argmax(-1).sum()


def used_at_last(out: Tensor, there: Tensor) -> Tensor:
    used_at_last.calls += 1  # type: ignore[attr-defined]
    return out.mean() if used_at_last.calls == 4 else out[there].mean()  # type: ignore[attr-defined]


def findings(folder: Path, model: nn.Module, use: Callable[[Tensor, Tensor], Tensor]) -> list[str]:
    """What five calls show of which the caller uses the results so."""
    used_at_last.calls = 0  # type: ignore[attr-defined]

    def program() -> None:
        torch.manual_seed(0)
        mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
        for _ in range(5):
            with torch.no_grad():
                use(model(torch.randn(2, 3, 4).abs() + 1, mask), mask.sum(1) > 0).item()

    return [one.id for one in diagnose(in_place(folder, program)) if one.severity is not Severity.INFO]


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("model", [Mean(), Attention()], ids=["mean", "attention"])
@pytest.mark.parametrize("use", [left_out, marked])
def test_rows_that_the_caller_leaves_out_are_no_failure(
    model: nn.Module, use: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    """By an index, a selection, or a mean without NaN, in each of the calls; also where NaN is what they are replaced by."""
    assert findings(tmp_path, model, use) == []


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    ("model", "use", "told"),
    [
        (Mean(), decides, "domain-error"),
        (Mean(), used_at_last, "domain-error"),
        (Attention(), used_at_last, "fully-masked-row"),
        (Squares(), left_out, "float16-overflow"),
    ],
)
def test_rows_that_are_used_or_that_half_precision_has_spoiled_are_told(
    model: nn.Module, use: Callable[[Tensor, Tensor], Tensor], told: str, tmp_path: Path
) -> None:
    """A decision uses them, too; and what overflows is a failure of the dtype, whoever leaves it out."""
    assert told in findings(tmp_path, model, use)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_ordinary_numbers_that_overflow_before_a_model_are_its_origin_whatever_their_sign(
    tmp_path: Path, sign: float
) -> None:
    """The model makes NaN of the infinities that it is given. They were made behind the optimizer's third step, for the fourth."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def program() -> None:
        for step in range(4):
            scale = torch.ones(4, 8).half()
            scale[3, 3] = sign * (40_000.0 if step == 3 else 1.0)
            (model(torch.full((4, 8), 2.0).half() * scale) ** 2).mean().backward()
            optimizer.step()

    (finding,) = (one for one in diagnose(in_place(tmp_path, program)) if one.severity is Severity.ERROR)
    assert (finding.id, finding.op) == ("float16-overflow", "aten.mul.Tensor")
    assert (finding.step, finding.phase) == (4, "forward")
    assert str(finding.source).startswith("test_selected_away.py")


def test_the_negative_infinities_of_a_mask_are_no_overflow_before_a_model(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (x + mask).softmax(-1)

    def program() -> None:
        for _ in range(3):
            mask = torch.tensor([[torch.finfo(torch.float32).min] * 2]).half()
            Masked()(torch.ones(1, 2).half(), mask + mask).sum().item()

    assert [one.id for one in diagnose(in_place(tmp_path, program)) if one.severity is Severity.ERROR] == [
        "fully-masked-row"
    ]


def test_a_number_of_the_code_that_a_mask_is_made_of_is_named(tmp_path: Path) -> None:
    """Nothing is added to it: float16 has no such number."""

    class Masked(nn.Module):
        def forward(self, x: Tensor, pad: Tensor) -> Tensor:
            return torch.where(pad, -1e9, x).softmax(-1)

    def program() -> None:
        Masked()(torch.ones(1, 2).half(), torch.ones(1, 2, dtype=torch.bool)).sum().item()

    (found,) = (one for one in diagnose(in_place(tmp_path, program)) if one.severity is Severity.ERROR)
    assert found.id == "fully-masked-row"
    assert "masks with -1e9, and the smallest number of float16 is -65,504" in found.cause
