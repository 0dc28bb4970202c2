"""What happens behind an optimizer's step, before anything else of an iteration begins, is told of that step, and not of the next one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor.diagnosis import diagnose

STEPS = 20


def training(
    behind: Callable[[int], object], before: Callable[[int], object] = lambda _: None
) -> Callable[[object], None]:
    """A loop that does something before its model is called, and behind its optimizer's step."""

    def work(_: object) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for iteration in range(1, STEPS + 1):
            loss = model(torch.randn(8, 4)).square().mean()
            before(iteration)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            behind(iteration)

    return work


def overflowing(in_iteration: int) -> Callable[[int], object]:
    """A sum that float16 does not hold, and that is printed."""

    def at(iteration: int) -> object:
        return float(torch.tensor(60000.0).half() + (9000 if iteration == in_iteration else 1))

    return at


def counting(start: float) -> Callable[[int], object]:
    """A count in float16, which stands still at 2048."""
    total: list[Tensor] = [torch.tensor(start, dtype=torch.float16)]

    def at(_: int) -> object:
        total[0] = total[0] + 1
        return float(total[0])

    return at


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("work", "moment"),
    [
        (training(overflowing(6)), (6, "after the optimizer")),
        (training(lambda _: None, overflowing(6)), (6, "forward")),
        (training(overflowing(STEPS)), (STEPS, "after the optimizer")),
    ],
    ids=["behind the step", "behind the loss", "behind the last step"],
)
def test_an_overflow_is_told_of_the_step_that_it_follows(
    tmp_path: Path, work: Callable[[object], None], moment: tuple[int, str]
) -> None:
    """In the headline, and in the fields of the finding."""
    (finding,) = [finding for finding in diagnose(watched(tmp_path, work)) if finding.id == "float16-overflow"]
    assert (finding.step, finding.phase) == moment
    assert f"step {moment[0]}, {moment[1]}:" in finding.summary


def test_no_step_is_told_of_that_the_program_has_not_made(tmp_path: Path) -> None:
    """A count that is wrong is so in one of the program's steps, also where the end of the program tells of it."""
    (finding,) = [one for one in diagnose(watched(tmp_path, training(counting(2044)))) if one.id == "rounded-sum"]
    assert finding.phase == "after the optimizer"
    assert finding.step is not None
    assert finding.step <= STEPS
