"""``rounded-indices``: whole numbers that half precision changes on their way back to whole numbers, and those that it does not change."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Finding
from dtypedoctor.instrument.instruments import Instruments


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


def counted(dtype: torch.dtype, rows: int, whole: torch.dtype = torch.int64) -> Callable[[object], None]:

    def work(_: object) -> None:
        model = Embeds()
        for _ in range(2):
            mask = torch.ones(2, rows, dtype=dtype)
            mask[1, :4] = 0
            positions = mask.cumsum(-1) - 1
            model(positions.masked_fill(mask == 0, 1).to(whole)).sum().backward()

    return work


def count_inside(_: object) -> None:
    model = Embeds()
    model.register_forward_pre_hook(lambda module, args: (args[0].cumsum(-1).sub(1),))
    for _ in range(2):
        model(torch.ones(2, 300, dtype=torch.bfloat16)).sum().backward()


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("work", "line"),
    [
        (counted(torch.bfloat16, 300), "positions = mask.cumsum(-1) - 1"),
        (count_inside, "args[0].cumsum(-1).sub(1)"),
    ],
    ids=["outside", "inside"],
)
def test_positions_that_are_counted_in_half_precision_are_found(
    tmp_path: Path, work: Callable[[object], None], line: str
) -> None:
    """At the line that counts, whatever is subtracted or filled in before they are whole numbers again."""
    (finding,) = found(tmp_path, work)
    number = int((finding.source or ":0").rpartition(":")[2])
    assert line in Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1]
    assert "counts in bfloat16" in finding.summary
    assert finding.proven_by is not None


@pytest.mark.release(all_but=2)
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


def in_the_default_dtype(make: Callable[[], Tensor]) -> Callable[[object], None]:
    """Ids that are made of numbers, or of whole numbers, without a dtype."""

    def work(_: object) -> None:
        model = Embeds()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            for _ in range(2):
                model(make()).sum().backward()
        finally:
            torch.set_default_dtype(before)

    return work


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(0.0, 900),
        lambda: torch.arange(900) / 1,
        lambda: torch.arange(900) * 1.0,
    ],
    ids=["arange", "a quotient", "a product"],
)
def test_ids_that_are_made_in_a_default_dtype_of_half_precision_are_found(
    tmp_path: Path, make: Callable[[], Tensor]
) -> None:
    """No operand and no argument says which dtype it is."""
    (finding,) = found(tmp_path, in_the_default_dtype(make))
    assert "have changed" in finding.summary
    assert finding.proven_by is not None


def late_and_out_of_range(instruments: Instruments) -> None:
    """A long text is the first that has ids which bfloat16 does not hold, long after the last look at the model."""
    instruments.in_place.begin()
    model = Embeds()
    for _ in range(60):
        model(torch.arange(10).bfloat16())
    model(torch.arange(1000).bfloat16())


def test_a_lookup_out_of_range_is_told_of_where_nobody_looks(tmp_path: Path) -> None:
    """The call that raises is made again, and looked at then."""
    trace = watched(tmp_path, late_and_out_of_range)
    (finding,) = [finding for finding in diagnose(trace) if finding.id == "rounded-indices"]
    assert finding.step == 1
    assert "of 1,000 have changed" in finding.summary


@pytest.mark.release(all_but=3)
@pytest.mark.parametrize(
    "work",
    [
        looked_up(torch.bfloat16, 255),
        looked_up(torch.float32, 999),
        as_labels(torch.float16, 2040),
        lambda _: torch.arange(900).bfloat16().mul(0.5).long(),
        lambda _: torch.arange(900).bfloat16().sin().float(),
        counted(torch.bfloat16, 256),
        counted(torch.float16, 999),
        counted(torch.float32, 999),
        counted(torch.int64, 999),
        counted(torch.bool, 999),
        lambda _: torch.full((900,), 0.3).bfloat16().cumsum(0).long(),
        lambda _: torch.ones(900).bfloat16().cumsum(0).div(900).mul(10).long(),
        lambda _: torch.ones(900).bfloat16().cumsum(0).sub_(1).zero_().long(),
    ],
    ids=[
        "few ids",
        "float32",
        "float16",
        "other numbers",
        "never whole again",
        "few counted",
        "counted in float16",
        "counted in float32",
        "counted in integers",
        "counted truths",
        "fractions",
        "shares",
        "overwritten",
    ],
)
def test_indices_that_are_the_same_are_not_told_of(tmp_path: Path, work: Callable[[object], None]) -> None:
    """Nor are numbers that something else was made of."""
    assert not found(tmp_path, work)


class Items(Dataset[Tensor]):
    """Ids in half precision, which a worker makes."""

    def __init__(self, first: int) -> None:
        self._first = first

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor(float(self._first + number)).half()


def of_workers(first: int) -> Callable[[object], None]:
    def work(_: object) -> None:
        table = nn.Embedding(6000, 4)
        for ids in DataLoader(Items(first), batch_size=8, num_workers=1):
            table(ids.long()).sum().backward()

    return work


def of_numpy(first: int) -> Callable[[object], None]:
    def work(_: object) -> None:
        table = nn.Embedding(6000, 4)
        ids = torch.from_numpy(np.arange(first, first + 16).astype(np.float16))
        table(ids.clone().long()).sum().backward()

    return work


@pytest.mark.parametrize("make", [of_workers, of_numpy])
def test_ids_that_come_in_half_precision_are_told_of_where_it_lacks_some(
    make: Callable[[int], Callable[[object], None]], tmp_path: Path
) -> None:
    """Which of them were others before is not known, so nothing is proven; below 2,048 float16 has all."""
    for name in ("beyond", "within"):
        (tmp_path / name).mkdir()
    (finding,) = found(tmp_path / "beyond", make(5000))
    assert (finding.severity, finding.confidence, finding.proven_by) == ("warning", "likely", None)
    assert "reads whole numbers from float16" in finding.summary
    assert not found(tmp_path / "within", make(1900))
