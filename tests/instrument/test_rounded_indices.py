"""``rounded-indices``: whole numbers that half precision changes on their way back to whole numbers, and those that it does not change."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Finding


class Embeds(nn.Module):
    """Looks up rows by what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 4)

    def forward(self, index: Tensor) -> Tensor:
        """Takes indices of any dtype."""
        rows: Tensor = self.table(index.long())
        return rows


def found(directory: Path, work: Callable[[object], None]) -> list[Finding]:
    """What is found of indices."""
    return [finding for finding in diagnose(watched(directory, work)) if finding.id == "rounded-indices"]


def looked_up(dtype: torch.dtype, most: int) -> Callable[[object], None]:
    """Ids up to ``most`` that are cast with the batch, and back inside of the model."""

    def work(_: object) -> None:
        model = Embeds()
        for _ in range(2):
            ids = torch.arange(most - 9, most + 1)
            model(ids.to(dtype)).sum().backward()

    return work


def as_labels(dtype: torch.dtype, most: int) -> Callable[[object], None]:
    """The same of labels, outside of modules."""

    def work(_: object) -> None:
        model = nn.Linear(4, 3000)
        for _ in range(2):
            labels = torch.arange(most - 9, most + 1).view(2, 5)
            labels = labels.to(dtype)
            nn.functional.cross_entropy(model(torch.randn(10, 4)), labels.flatten().to(torch.int64)).backward()

    return work


@pytest.mark.parametrize(
    ("work", "line"),
    [
        (looked_up(torch.bfloat16, 999), "model(ids.to(dtype))"),
        (as_labels(torch.bfloat16, 999), "labels = labels.to(dtype)"),
        (as_labels(torch.float16, 2999), "labels = labels.to(dtype)"),
    ],
    ids=["token ids", "labels", "float16"],
)
def test_indices_that_have_changed_are_found_at_the_line_that_casts_them(
    tmp_path: Path, work: Callable[[object], None], line: str
) -> None:
    """Once, proven by the numbers before."""
    (finding,) = found(tmp_path, work)
    number = int((finding.source or ":0").rpartition(":")[2])
    assert line in Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1]
    assert finding.proven_by is not None
    assert "of 10 have changed" in finding.summary


@pytest.mark.parametrize(
    "work",
    [
        looked_up(torch.bfloat16, 255),
        looked_up(torch.float32, 999),
        as_labels(torch.float16, 2040),
        lambda _: torch.arange(900).bfloat16().mul(0.5).long(),
        lambda _: torch.arange(900).bfloat16().sin().float(),
    ],
    ids=["few ids", "float32", "float16", "other numbers", "never whole again"],
)
def test_indices_that_are_the_same_are_not_told_of(tmp_path: Path, work: Callable[[object], None]) -> None:
    """Nor are numbers that something else was made of."""
    assert not found(tmp_path, work)
