"""``rounded-sum``: sums in half precision that are wrong are told of with what they should be, and sums that are right are not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Finding
from dtypedoctor.instrument.silent.state import FEWEST, _compare, _State
from dtypedoctor.rules.silent.vanishing import ROUNDED_SUM
from dtypedoctor.trace.records.silent import RoundedSum


def sums(directory: Path, work: Callable[[object], None]) -> list[Finding]:
    return [finding for finding in diagnose(watched(directory, work)) if finding.id == "rounded-sum"]


def added(
    dtype: torch.dtype, many: int, term: Callable[[int], float], *, in_place: bool = True
) -> Callable[[object], None]:

    def work(_: object) -> None:
        total = torch.zeros((), dtype=dtype)
        for number in range(many):
            one = torch.tensor(term(number), dtype=dtype)
            if in_place:
                total += one
            else:
                total = total + one

    return work


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    ("work", "line"),
    [
        (added(torch.bfloat16, 400, lambda _: 1.0), "total += one"),
        (added(torch.bfloat16, 400, lambda _: 1.0, in_place=False), "total = total + one"),
        pytest.param(added(torch.float16, 3000, lambda _: 1.0), "total += one", marks=pytest.mark.release),
        (added(torch.bfloat16, 600, lambda number: 3.2 + 0.01 * (number % 7)), "total += one"),
    ],
    ids=["count", "count anew", "float16 count", "losses"],
)
def test_sums_that_stand_still_are_found_at_their_line(
    tmp_path: Path, work: Callable[[object], None], line: str
) -> None:
    """Once, proven by the sum in float64."""
    (finding,) = sums(tmp_path, work)
    number = int((finding.source or ":0").rpartition(":")[2])
    assert line in Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1]
    assert finding.proven_by is not None


def a_buffer_that_counts(_: object) -> None:
    seen = torch.tensor(2040.0, dtype=torch.float16)
    for _ in range(40):
        seen += 1


def counts_by_index(_: object) -> None:
    count = torch.zeros(3, dtype=torch.float16)
    for _ in range(60):
        count.index_add_(0, torch.zeros(100, dtype=torch.long), torch.ones(100, dtype=torch.float16))


def gradients_of_many_passes(_: object) -> None:
    model = nn.Linear(8, 1).bfloat16()
    for row in torch.randn(600, 8).abs().bfloat16().split(1):
        (model(row).float() - 20).sum().backward()
    torch.optim.SGD(model.parameters(), 0.05).step()


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    ("work", "words"),
    [
        (a_buffer_that_counts, "Make the sum float32 where it is made"),
        (counts_by_index, "Make the sum float32 where it is made"),
        (gradients_of_many_passes, "Have float32 gradients"),
        (added(torch.bfloat16, 400, lambda _: 1.0, in_place=False), "Make the sum float32 where it is made"),
    ],
    ids=["buffer", "index_add_", "gradient", "computed anew"],
)
def test_what_to_do_is_of_the_tensor_that_has_the_dtype(
    work: Callable[[object], None], words: str, tmp_path: Path
) -> None:
    """A cast of what is added helps no sum that is written in place."""
    finding = sums(tmp_path, work)[0]
    assert ROUNDED_SUM.instead is not None
    advice = ROUNDED_SUM.instead(finding) or ROUNDED_SUM.do_this
    assert advice.startswith(words)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("start", [2000.0, 30000.0])
def test_a_sum_that_begins_high_is_compared_with_what_is_added(tmp_path: Path, start: float) -> None:
    """Of what the loop adds a good part is lost, or made up, which beside the total is little."""

    def work(_: object) -> None:
        total = torch.tensor(start, dtype=torch.float16)
        for number in range(60):
            total += torch.tensor(3.0 + 0.02 * (number % 5), dtype=torch.float16) * (start / 2000)

    (finding,) = sums(tmp_path, work)
    assert finding.proven_by is not None


@pytest.mark.release(all_but=3)
@pytest.mark.parametrize(
    "work",
    [
        added(torch.bfloat16, 200, lambda _: 1.0),
        added(torch.float16, 400, lambda _: 1.0),
        added(torch.float32, 400, lambda _: 1.0),
        added(torch.bfloat16, 400, lambda number: (-1.0) ** number * 1.01),
        added(torch.bfloat16, 60, lambda number: 0.3 + 0.1 * (number % 3)),
        added(torch.float16, 60, lambda number: 2000.0 if number == 0 else 0.3 + 5.9 * (number * 0.618 % 1)),
        added(torch.float16, 60, lambda number: 2000.0 if number == 0 else 3.0 * (-1) ** number),
    ],
    ids=["few", "float16", "float32", "both signs", "losses of a short epoch", "random roundings", "beside its start"],
)
def test_sums_that_are_right_are_not_told_of(tmp_path: Path, work: Callable[[object], None]) -> None:
    """Nor are terms that cancel."""
    assert not sums(tmp_path, work)


def test_a_sum_is_told_of_from_the_call_on_in_which_it_was_another_one(tmp_path: Path) -> None:
    """Fourteen times 38 are exact in bfloat16, fifteen times are not: judged it is after sixteen."""

    def work(_: object) -> None:
        layer, total = nn.Linear(2, 2), torch.zeros((), dtype=torch.bfloat16)
        for _ in range(60):
            layer(torch.ones(1, 2))
            total += 38

    (finding,) = diagnose(trace := watched(tmp_path, work))
    assert finding.id == "rounded-sum"
    assert trace.observed(RoundedSum)[0].call == 15


def test_additions_between_looks_are_not_said_to_have_been_followed(tmp_path: Path) -> None:
    """A sum over steps of which some are looked at: it says from where on the additions that it has seen led to where."""

    def work(_: object) -> None:
        module, total = nn.Linear(1, 1), torch.zeros((), dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        for _ in range(60):
            loss = module(torch.ones(1)).abs().mean()
            loss.backward()
            optimizer.step()
            for _ in range(20):
                total += torch.tensor(0.7, dtype=torch.bfloat16)

    (finding,) = [found for found in diagnose(watched(tmp_path, work, every=7)) if found.id == "rounded-sum"]
    assert "additions that were followed take it from" in finding.summary


def test_what_kahans_sum_keeps_is_no_drift_where_it_was_met_again() -> None:
    """After steps that nobody looked at it begins as what it is; the next step leaves nothing of it in float64, and another rest in half precision."""
    rest = torch.full((16,), 8e-4, dtype=torch.bfloat16)
    state = _State.of(rest, rest, rest.double())
    for turn in range(2 * FEWEST):
        left = 1e-3 if turn == 0 else 1e-17
        state.becomes(rest * (-1.0) ** turn, torch.full((16,), left, dtype=torch.float64))
        state.turns += 1
        _compare([state])
    assert state.off > 0.0
    assert not state.has_drifted()
