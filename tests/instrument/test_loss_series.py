"""The losses of a report: the program's own, one for each step, whatever a gradient scaler makes of them."""

from pathlib import Path

import pytest
import torch
from torch import nn

import dtypedoctor


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_losses_beside_a_scaler_are_those_of_the_program_in_skipped_steps_too(tmp_path: Path, accumulated: int) -> None:
    """Not multiplied by the scale, and NaN in the step that the scaler skips."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    losses = []
    with dtypedoctor.watch(net, out=tmp_path / "run") as watched:
        for step in range(4):
            for _ in range(accumulated):
                x = torch.full((2, 4), float("nan") if step == 2 else 1.0)
                loss = net(x).square().mean()
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    run = watched.report.before
    assert run is not None
    assert run.loss == pytest.approx([*losses[:2], None, losses[3]])
    assert run.nonfinite == {"loss": {"2": "nan"}}
    assert run.steps_completed == 4


def test_a_loss_that_no_scaler_has_scaled_is_that_of_the_backward_pass(tmp_path: Path) -> None:
    """Also where another loss was scaled before, and where the scaler is off."""
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    off, on = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (False, True))
    with dtypedoctor.watch(net, out=tmp_path / "run") as watched:
        first = net(torch.ones(2, 4)).square().mean()
        off.scale(first).backward()
        optimizer.step()
        on.scale(torch.tensor(3.0))
        second = net(torch.ones(2, 4)).square().mean()
        second.backward()
        optimizer.step()
    assert watched.report.before is not None
    assert watched.report.before.loss == pytest.approx([first.item(), second.item()])
