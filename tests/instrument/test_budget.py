"""A watch with a budget: what is measured in which step, when everything is measured again, and what is said about the rest. Never in real time."""

import random
from contextlib import suppress
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import torch
from torch import nn
from watched import watched

from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.budget import AFTER_SIGN, CREDIT, ENOUGH, FIRST, IN_A_ROW, IN_HALF, SIGNS, Budget, budget_of
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.instrument.live_call import RandomState
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import ReplayedCall, SteppedBy

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
    return {trace.sites[s.site].fqn for s in trace.samples if s.step == step and trace.sites[s.site].kind == kind}


class Clock:
    """Tells the seconds that a test makes pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """The seconds so far."""
        return self.now


def looked_at(steps: int, look: float, *, share: float = 0.05, credit: float = 0.0) -> tuple[list[bool], float]:
    """Which steps of a program are looked at that take a second each, and the seconds that looks have taken."""
    clock = Clock()
    budget = Budget(share=share, credit=credit, clock=clock, busy=clock)
    found: list[bool] = []
    for step in range(1, steps + 1):
        found.append(budget.step_begins(step))
        clock.now += 1.0 + look * found[-1]
    return found, look * sum(found)


@pytest.mark.parametrize("look", [0.1, 1.0, 8.0])
def test_the_first_steps_are_looked_at_and_then_the_time_decides(look: float) -> None:
    """A twentieth of the time is spent on looks from then on, however long one takes."""
    found, spent = looked_at(2_000, look)
    assert found[:FIRST] == [True] * FIRST
    assert found[FIRST : FIRST + ENOUGH] == [False] * ENOUGH
    assert 0.04 * 2_000 <= spent <= 0.055 * (2_000 + spent) + FIRST * look


def test_looks_that_cost_nothing_are_taken_in_each_step() -> None:
    """What a look costs is what steps that are looked at take longer."""
    assert looked_at(100, 0.0)[0].count(False) == ENOUGH


def test_a_short_program_is_seen_whole() -> None:
    """The seconds of its own thread that are for nothing are counted from its first step on."""
    found, _ = looked_at(60, 1.0, credit=40.0)
    assert found[:20] == [True] * 20
    assert found[20 : 20 + ENOUGH] == [False] * ENOUGH


def test_looks_that_are_paid_for_come_in_rows() -> None:
    """State stands still only where the same state was seen in several steps, one after the other."""
    found, _ = looked_at(2_000, 1.0)
    rows = "".join("x" if looks else " " for looks in found[FIRST:]).split()
    assert len(rows) > 10
    assert {len(row) for row in rows[:-1]} == {IN_A_ROW}


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("dtype", "whole"), [(torch.float32, CREDIT), (torch.bfloat16, IN_HALF)])
def test_a_program_in_half_precision_is_seen_whole_for_longer(tmp_path: Path, dtype: torch.dtype, whole: float) -> None:
    """Also where no module is called: what decides is that an operator has met half precision."""
    clock = Clock()
    budget = Budget(share=1e-9, clock=clock, busy=clock)

    def add_up(_: Instruments) -> None:
        total, weight = torch.zeros(8, dtype=dtype), torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight])
        for _ in range(2 * int(IN_HALF)):
            total += 1
            weight.sum().backward()
            before = budget.looked[True]
            optimizer.step()
            clock.now += 1.0 + (budget.looked[True] - before)

    watched(tmp_path, add_up, budget=budget)
    assert budget.looked[True] == pytest.approx(max(FIRST, whole / 2), abs=1)


def test_calls_without_steps_have_a_schedule_of_their_own(tmp_path: Path) -> None:
    """A program that only infers is looked at in the first calls of each of its modules, then now and then."""
    nets = [Stack(), Stack()]

    def infer(_: Instruments) -> None:
        with torch.no_grad():
            for net in nets:
                for _ in range(20):
                    net(torch.ones(2, 4))
                    sleep(0.01)

    trace = watched(tmp_path, infer, budget=Budget(share=1e-9, credit=0.0))
    for root in range(len(nets)):
        inner = [
            s.call
            for s in trace.samples
            if trace.sites[s.site].root == root and trace.sites[s.site].fqn == "layers.1.0"
        ]
        outer = [s.call for s in trace.samples if trace.sites[s.site].root == root and trace.sites[s.site].fqn == ""]
        assert len(inner) == FIRST
        assert len(outer) > FIRST  # what a call returns is all that shows what goes wrong in it
    (note,) = [note for note in trace.all(NotWatched) if "outermost calls" in note.what]
    assert "steps" not in note.what + note.why  # there are none


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("raises", [False, True])
def test_looks_that_end_or_begin_in_inference_mode_leave_the_dispatcher_as_it_should_be(
    tmp_path: Path, raises: bool
) -> None:
    """torch puts its dispatcher back where inference mode ends, so that the next operator without tensors would ask for a mode that has gone."""
    net, seen = Stack(), []

    def infer(instruments: Instruments) -> None:
        for _ in range(20):
            with suppress(RuntimeError), torch.inference_mode():
                for _ in range(3):
                    net(torch.ones(2, 4))
                    sleep(0.005)
                if raises:
                    net(torch.ones(2, 5))
            before = instruments.session.coverage.operators
            assert torch.arange(3).tolist() == [0, 1, 2]
            seen.append((instruments.sentinel.on, instruments.session.coverage.operators > before))

    watched(tmp_path, infer, budget=Budget(share=0.3, credit=0.0))
    assert {on for on, _ in seen} == {False, True}
    assert all(on == counted for on, counted in seen)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("raises", [False, True])
def test_calls_in_quick_succession_have_their_numbers(tmp_path: Path, raises: bool) -> None:
    """Nobody is told of most of them; the next one that is told of, or the one that raises, is the 51st all the same."""
    net, number = Stack(), []

    def infer(instruments: Instruments) -> None:
        with torch.no_grad():
            for _ in range(50):
                net(torch.ones(2, 4))
            if raises:
                with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                    net(torch.ones(2, 5))
            else:
                sleep(0.01)
                net(torch.ones(2, 4))
        number.append(instruments.session.position.call)

    watched(tmp_path, infer, budget=Budget(share=1e-9, credit=0.0))
    assert number == [51]


def test_between_looks_the_loss_is_measured_alone(tmp_path: Path) -> None:
    """Every fourth step holds each module and gradient; what was left out is said."""
    trace, _ = trained(tmp_path, Budget(every=4), 9)
    inner = {f"layers.{number}.{part}" for number in range(LAYERS) for part in (0, 1)}
    for step in range(1, 10):
        looked = step % 4 == 1
        assert (measured(trace, step) >= inner) is looked
        assert bool(measured(trace, step, "grad")) is looked
        assert measured(trace, step, "loss")
        assert bool(measured(trace, step)) is looked
    (note,) = [note for note in trace.all(NotWatched) if "outermost calls" in note.what]
    assert note.what == "the inside of 6 outermost calls and what runs between modules in their steps"
    assert note.why.startswith("3 of 9 steps were looked at (1/4)")


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("several", [False, True], ids=["one process", "DDP"])
@pytest.mark.usefixtures("group")
def test_an_exception_in_a_module_that_is_passed_by_is_told_of_there(tmp_path: Path, several: bool) -> None:
    """There are no hooks on it between looks, but where it raises it is as if all calls that are running had been entered; the next step counts as ever."""

    class Part(nn.Module):
        broken = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.broken:
                raise ValueError("this part is broken")
            return x

    part = Part()
    net: nn.Module = Stack()
    net.layers[2][1] = nn.Sequential(part)
    names = ["", "layers.2", "layers.2.1", "layers.2.1.0"]
    if several:
        net, names = nn.parallel.DistributedDataParallel(net), ["", *(f"module.{name}".rstrip(".") for name in names)]
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

    trace = watched(tmp_path, train, budget=Budget(every=50))
    assert heard == [("Part", names)]
    assert {s.step for s in trace.samples if trace.sites[s.site].kind == "loss"} == {1, 2, 4, 5}


def test_an_interruption_between_looks_ends_the_watch_of_no_later_call(tmp_path: Path) -> None:
    """Torch tells nobody that the call is over for which the hooks were lifted; they are back in the next step, also where another model is called."""

    class Part(nn.Module):
        stops = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.stops:
                raise KeyboardInterrupt
            return x

    part, net, other = Part(), Stack(), Stack()
    net.layers[2][1] = part
    optimizer = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=1e-3)

    def train(_: Instruments) -> None:
        for step in range(1, 10):
            part.stops = step == 3
            try:
                (net if step <= 3 else other)(torch.ones(2, 4)).square().mean().backward()
            except KeyboardInterrupt:
                assert step == 3
            optimizer.step()
            optimizer.zero_grad()

    trace = watched(tmp_path, train, budget=Budget(every=4))
    assert len(measured(trace, 5)) == len(measured(trace, 9)) == len(measured(trace, 1)) > LAYERS


def test_gradients_that_are_not_finite_are_measured_between_looks_by_name(tmp_path: Path) -> None:
    """All others of that step are not; the loss is finite, and only the gradients tell of it."""

    class Roots(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sqrt()

    net = nn.Sequential(nn.Linear(4, 4), Roots(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def train(_: Instruments) -> None:
        for step in range(1, 7):
            with torch.no_grad():
                net[0].weight.fill_(0.0 if step == 4 else 0.1)
                net[0].bias.fill_(0.0)
            net(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = watched(tmp_path, train, budget=Budget(every=50))
    assert measured(trace, 4, "grad") == {"0.weight", "0.bias"}
    assert not measured(trace, 3, "grad")
    assert measured(trace, 5, "grad") == measured(trace, 1, "grad")  # looked at because of that


def test_a_value_that_is_not_finite_has_the_next_steps_looked_at(tmp_path: Path) -> None:
    """The loss shows it in the step in which it comes."""
    trace, _ = trained(tmp_path, Budget(every=50), 8, spoil=4)
    assert next(s.step for s in trace.samples if not s.finite and trace.sites[s.site].kind == "loss") == 4
    assert not measured(trace, 3)
    assert measured(trace, 5) == measured(trace, 1)


def test_signs_are_answered_with_a_few_looks_and_not_for_ever() -> None:
    """What a program's scaler does every so often would else undo the budget."""
    budget = Budget(every=1_000)
    looks = []
    for step in range(1, 201):
        looks.append(budget.step_begins(step))
        if step % 20 == 10:
            budget.sign(step, "the gradient scaler skipped a step")
    assert looks[10 : 10 + AFTER_SIGN + 1] == [True] * AFTER_SIGN + [False]
    assert sum(looks) == 1 + SIGNS * AFTER_SIGN
    assert len(budget.signs) == SIGNS


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
    measured = ((sample, trace.sites[sample.site]) for sample in trace.samples)
    return [(sample.step, site.phase) for sample, site in measured if site.kind == "param" and not sample.finite]


def test_a_parameter_that_the_program_writes_after_a_step_is_not_taken_for_that_steps_work(tmp_path: Path) -> None:
    """It was not measured after step 4; what is found of it in step 5 is told as of step 5, and no optimizer made it."""
    trace, _ = trained(tmp_path, Budget(every=100), 5, spoil=5)
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

    trace = watched(tmp_path, train, budget=Budget(every=100))
    assert bad_parameters(trace)[0] == (4, "optimizer")
    assert [(seen.what.optimizer, seen.what.eps) for seen in trace.observed(SteppedBy)] == [("SGD", False)]


class DrawsOnTheHost(nn.Module):
    """Scales by a number of Python's generator, and overflows float16 in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 1.0, dtype=torch.float16))
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * (x * random.random()).half() * self.factor).float()


def test_a_call_that_draws_from_pythons_generator_is_made_again_with_the_same_numbers_between_looks(
    tmp_path: Path,
) -> None:
    """Its state is kept for a module that has drawn in a look, and for no other: to read it takes longer than the state of torch's."""
    random.seed(0)
    net = DrawsOnTheHost()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def train(instruments: Instruments) -> None:
        instruments.in_place.begin()
        for step in range(1, 7):
            net.factor = 6e4 if step == 5 else 1.0
            net(torch.full((2, 4), 8.0)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = watched(tmp_path, train, budget=Budget(every=50))
    replays = trace.observed(ReplayedCall)
    assert [(seen.step, seen.what.doubt) for seen in replays[:1]] == [(5, None)]


def test_only_what_has_moved_on_the_host_is_told_of() -> None:
    """Torch's own generators are none of the host's."""
    before = RandomState.now()
    torch.rand(3)
    assert not before.host_has_moved()
    random.random()
    assert before.host_has_moved()
    before = RandomState.now()
    np.random.rand(1)
    assert before.host_has_moved()
    assert not RandomState.now(host=False).host_has_moved()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_program_is_looked_at_again_where_it_first_leaves_gradients_off(tmp_path: Path, is_new: bool) -> None:
    """Its training is over and the time for looks spent; now it samples, in another dtype, before any module is called. A line that it has come by before says nothing new."""
    clock = Clock()
    budget = Budget(share=1e-9, clock=clock, busy=clock)

    def evaluate() -> None:
        with torch.inference_mode():
            torch.linspace(1, 0, 800).to(torch.bfloat16).diff().abs().argmin().item()

    def train(instruments: Instruments) -> None:
        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight])
        for _ in range(20):
            if not is_new:
                evaluate()
            weight.sum().backward()
            before = budget.looked[True]
            optimizer.step()
            clock.now += 1.0 + (budget.looked[True] - before)
        looks.append(instruments.position.looks)
        evaluate()
        looks.append(instruments.position.looks)

    looks: list[bool] = []
    watched(tmp_path, train, budget=budget)
    assert looks == [False, is_new]
