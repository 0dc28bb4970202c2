"""A watch with a budget: what is measured in which step, when everything is measured again, and what is said about the rest. Never in real time."""

from pathlib import Path

import pytest
import torch
from torch import nn
from watched import watched

from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.budget import AFTER_SIGN, APART, HORIZON, LOSS_ALONE, MOST, WHOLE, Budget, budget_of
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.instrument.meter import Meter
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import SteppedBy

LAYERS = 4


class Stack(nn.Module):
    """Layers of a linear module each, whose output is returned as it is by a second one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Identity()) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def trained(directory: Path, budget: Budget, steps: int, *, spoil: int = 0) -> tuple[Trace, list[torch.Tensor]]:
    """The trace of some training steps, in one of which the first layer's weight becomes inf, and the parameters after them."""
    torch.manual_seed(0)
    net = Stack()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def train(_: Instruments) -> None:
        for step in range(1, steps + 1):
            if step == spoil:
                with torch.no_grad():
                    net.layers[1][0].weight[0, 0] = float("inf")
            net(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = watched(directory, train, budget=budget)
    return trace, [parameter.detach() for parameter in net.parameters()]


def measured(trace: Trace, step: int, kind: str = "output") -> set[str]:
    """Names of what was measured in a step."""
    return {trace.sites[s.site].fqn for s in trace.samples if s.step == step and trace.sites[s.site].kind == kind}


class Clock:
    """Tells the seconds that a test makes pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The seconds so far."""
        return self.now


def periods(steps: int, whole: float, outline: float = 0.0, loss: float = 0.0) -> tuple[list[int], list[float]]:
    """How the steps of a program are measured that take a second each without it, and what that takes.

    Args:
        steps: how many.
        whole: seconds of measuring a whole step.
        outline: of these, for the residual stream and the loss.
        loss: of these, for what is done in each step.
    """
    clock = Clock()
    budget = Budget(share=0.05, clock=clock)
    assert budget.meter is not None
    found: list[int] = []
    spent: list[float] = []
    for step in range(1, steps + 1):
        found.append(budget.period(step))
        spent.append(loss if found[-1] == LOSS_ALONE else outline + (whole - outline) / found[-1])
        budget.meter.took(spent[-1])
        clock.now += 1.0 + spent[-1]
    return found, spent


@pytest.mark.parametrize(("whole", "outline"), [(0.15, 0.0), (0.4, 0.01), (0.4, 0.03), (0.5, 0.2)])
def test_the_first_steps_are_whole_and_then_the_time_decides(whole: float, outline: float) -> None:
    """What the first steps have cost is brought back, and from then on a twentieth is spent."""
    found, spent = periods(1_000, whole, outline)
    assert found[:WHOLE] == [1] * WHOLE
    assert found[WHOLE] == LOSS_ALONE or found[WHOLE] > whole / 0.05  # more than the budget alone would ask for
    assert sum(spent[1 : 3 * HORIZON]) / (3 * HORIZON) <= 0.055
    assert 0.04 <= sum(spent[1:]) / len(spent) <= 0.05
    assert len(set(found[-HORIZON:])) <= 3


def test_a_cheap_watch_stays_whole_and_an_expensive_one_still_sees_every_layer() -> None:
    """Within the budget nothing is left out; beyond any budget the residual stream and each layer still have their turns."""
    assert set(periods(100, 0.01)[0]) == {1}
    found, spent = periods(5_000, 9.0, outline=0.9, loss=0.01)
    assert set(found[-APART:]) == {MOST, LOSS_ALONE}
    assert found[-APART:].count(MOST) == 1
    assert sum(spent[-APART:]) / APART < 0.09


def test_the_meter_counts_what_hooks_take_once(tmp_path: Path) -> None:
    """A hook that calls another is not counted twice, and one that raises is counted."""
    meter = Meter()
    seconds: list[float] = []

    def inner() -> None:
        seconds.append(meter.host)

    timed = meter.timed(inner)

    def outer() -> None:
        timed()
        raise KeyError

    with pytest.raises(KeyError):
        meter.timed(outer)()
    assert seconds == [0.0]
    assert meter.host > 0
    before = meter.host
    timed()
    assert meter.host > before
    budget = Budget(share=0.05)
    trained(tmp_path, budget, 3)
    assert budget.meter is not None
    assert budget.meter.host > 0


def test_each_layer_has_its_turn_and_the_residual_stream_is_always_measured(tmp_path: Path) -> None:
    """In four steps of a schedule of 1/4 every module is measured once; parameters' gradients take turns as well."""
    trace, _ = trained(tmp_path, Budget(fixed=4), 9)
    stream = {f"layers.{number}" for number in range(LAYERS)}
    inner = {f"layers.{number}.{part}" for number in range(LAYERS) for part in (0, 1)}
    assert measured(trace, 1) >= stream | inner
    for step in range(2, 10):
        assert measured(trace, step) >= stream
        assert len(measured(trace, step) & inner) == 2
    assert set().union(*(measured(trace, step) for step in range(2, 6))) >= stream | inner
    gradients = [measured(trace, step, "grad") for step in range(2, 6)]
    assert set().union(*gradients) == measured(trace, 1, "grad")
    assert sum(map(len, gradients)) == 2 * LAYERS
    (note,) = [note for note in trace.all(NotWatched) if "layers" in note.what]
    assert note.what == "some layers, and operators outside of modules, in 8 of 9 steps"
    assert "1 of 4" in note.why


def test_an_exception_in_a_module_that_is_passed_by_is_told_of_there(tmp_path: Path) -> None:
    """Its hooks do nothing in a thinned step, but where it raises it is as if it had been entered; the next step counts as ever."""

    class Part(nn.Module):
        broken = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.broken:
                raise ValueError("this part is broken")
            return x

    part = Part()
    net = Stack()
    net.layers[2][1] = nn.Sequential(part)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    heard: list[tuple[str, list[str]]] = []

    def train(instruments: Instruments) -> None:
        modules = instruments.modules
        modules.on_error = [lambda module, args, error: heard.append((type(module).__name__, modules.raised_in[1]))]
        for step in range(1, 6):
            part.broken = step == 3
            try:
                net(torch.ones(2, 4)).square().mean().backward()
            except ValueError:
                assert step == 3
            optimizer.step()
            optimizer.zero_grad()

    trace = watched(tmp_path, train, budget=Budget(fixed=50))
    assert heard == [("Part", ["", "layers.2", "layers.2.1.0"])]
    assert {f"layers.{number}" for number in range(LAYERS)} <= measured(trace, 5)


def test_a_value_that_is_not_finite_has_everything_measured_again(tmp_path: Path) -> None:
    """The residual stream shows it in the step in which it comes; the steps after that are whole."""
    trace, _ = trained(tmp_path, Budget(fixed=50), 8, spoil=4)
    bad = [s for s in trace.samples if not s.finite and trace.sites[s.site].kind == "output"]
    assert min(s.step for s in bad) == 4
    assert trace.sites[min(bad, key=lambda s: s.n).site].fqn.startswith("layers.1")
    assert len(measured(trace, 3)) < len(measured(trace, 5)) == len(measured(trace, 1))


def test_signs_end_the_thinning_for_some_steps() -> None:
    """A magnitude that grows fourfold, one close to the end of float16, and what the program's scaler says."""
    for sign in ("growth", "headroom", "skip"):
        budget = Budget(fixed=10)
        for step in range(1, 6):
            assert budget.period(step) == (1 if step == 1 else 10)
            budget.measured(step, 1, "output", torch.float16, 10.0)
        if sign == "growth":
            budget.measured(5, 1, "output", torch.float16, 41.0)
        elif sign == "headroom":
            budget.measured(5, 2, "output", torch.float16, 9_000.0)
        else:
            budget.sign("the gradient scaler skipped a step")
        periods = [budget.period(step) for step in range(6, 6 + AFTER_SIGN + 2)]
        assert periods == [1] * AFTER_SIGN + [10, 10][: len(periods) - AFTER_SIGN], sign
        assert len(budget.signs) == 1


def test_training_is_bitwise_the_same_within_a_budget(tmp_path: Path) -> None:
    """What is measured changes nothing."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "thin").mkdir()
    _, expected = trained(tmp_path / "whole", Budget(fixed=1), 6)
    _, found = trained(tmp_path / "thin", Budget(fixed=3), 6)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("text", ["", "0%", "150%", "1/x", "five", "1/0"])
def test_what_is_no_budget_is_a_usage_error(text: str) -> None:
    """Nothing is guessed."""
    with pytest.raises(UsageError):
        budget_of(text)


def test_overhead_budget_off_measures_everything() -> None:
    """It measures everything."""
    assert budget_of("off") is None
    assert budget_of(None) is None
    assert budget_of(0.05) is not None


def bad_parameters(trace: Trace) -> list[tuple[int, str]]:
    """Step and phase of each measurement of a parameter that is not finite."""
    measured = ((sample, trace.sites[sample.site]) for sample in trace.samples)
    return [(sample.step, site.phase) for sample, site in measured if site.kind == "param" and not sample.finite]


def test_a_parameter_that_the_program_writes_after_a_step_is_not_taken_for_that_steps_work(tmp_path: Path) -> None:
    """It was not measured after step 4; what is found of it in step 5 is told as of step 5, and no optimizer made it."""
    trace, _ = trained(tmp_path, Budget(fixed=100), 5, spoil=5)
    assert bad_parameters(trace)[0] == (5, "forward")


def test_a_parameter_that_a_step_spoils_is_told_with_that_step_though_it_is_measured_later(tmp_path: Path) -> None:
    """Nothing else has written to it since."""
    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def train(_: Instruments) -> None:
        for step in range(1, 6):
            optimizer.param_groups[0]["lr"] = float("inf") if step == 4 else 1e-3
            net(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = watched(tmp_path, train, budget=Budget(fixed=100))
    assert bad_parameters(trace)[0] == (4, "optimizer")
    assert [(seen.what.optimizer, seen.what.eps) for seen in trace.observed(SteppedBy)] == [("SGD", False)]
