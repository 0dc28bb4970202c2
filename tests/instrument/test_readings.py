"""What is computed outside of modules on a device that the host waits for: read at once in some steps, and followed as on a CPU there."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from observed import observed
from plain_programs import FAULTY, HEALTHY
from test_plain_programs import found_in, label_of
from torch import nn
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.instrument import budget, sentinel
from dtypedoctor.instrument.budget import AT_HAND, FIRST_STEPS, Budget, Readings
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.trace.events import NotWatched, Op

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["waited for", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
"""A CPU that is read as sparingly as a GPU, and a GPU."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device that programs compute on."""
    if request.param == "cuda":
        return torch.device("cuda")
    monkeypatch.setattr(budget, "AT_HAND", frozenset())
    monkeypatch.setattr(budget, "WAITED_FOR", AT_HAND)
    monkeypatch.setattr(sentinel, "BEHIND", AT_HAND)
    return torch.device("cpu")


@pytest.mark.release(all_but=4)
@pytest.mark.parametrize("program", FAULTY, ids=lambda program: program.__name__)
def test_the_operator_that_makes_inf_or_nan_is_found(
    program: Callable[[], None], device: torch.device, tmp_path: Path
) -> None:
    """As on a CPU: operator and line are those that made it."""
    line, operators = label_of(program)
    with device:
        findings = found_in(tmp_path, program)
    assert findings, "called healthy"
    assert findings[0].source == f"plain_programs.py:{line}"
    named = f"{findings[0].op} {findings[0].summary}"
    assert any(f".{op}." in named or f"`{op}`" in named for op in operators), named


@pytest.mark.release(all_but=4)
@pytest.mark.parametrize("program", HEALTHY, ids=lambda program: program.__name__)
def test_infinities_that_are_meant_are_no_finding(
    program: Callable[[], None], device: torch.device, tmp_path: Path
) -> None:
    """Nor do they become one because only some results are read."""
    if device.type == "cuda" and ".numpy()" in inspect.getsource(program):
        pytest.skip("numpy reads no memory of a GPU")
    with device:
        assert not found_in(tmp_path, program)


def trains(device: torch.device, steps: int, between: Callable[[int], None] = lambda _: None) -> None:
    """A training whose loss is computed by several operators outside of modules."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        loss = (model(torch.ones(3, 4, device=device)).half().square().sum(1) + 1).log().mean()
        optimizer.zero_grad()
        loss.backward()
        between(step)
        optimizer.step()


def test_a_device_is_read_in_the_first_steps_and_then_in_ever_fewer(device: torch.device, tmp_path: Path) -> None:
    """What is not followed in the others is said."""
    made: dict[int, int] = {}

    def work(instruments: Instruments) -> None:
        def note(step: int) -> None:
            made[step] = instruments.session.readings.made

        trains(device, 34, note)

    trace = watched(tmp_path, work)
    read = [step for step in made if made[step] > made.get(step - 1, 0)]
    assert read == [*range(1, FIRST_STEPS + 1), 16, 32]
    assert [note.what for note in trace.all(NotWatched)] == [sentinel._NOT_FOLLOWED[0]]


def test_within_a_budget_each_look_reads(device: torch.device, tmp_path: Path) -> None:
    """What reading costs is a part of what a look costs, so the budget bounds it; a square that overflows from step 18 on and becomes finite again is seen."""

    def rescued(step: int) -> None:
        width = torch.full((4,), 300.0 if step > 17 else 3.0, dtype=torch.float16, device=device)
        (1 / (width * width)).sum()

    def work(instruments: Instruments) -> None:
        trains(device, 31, rescued)

    findings = diagnose(watched(tmp_path, work, budget=Budget(credit=60)))
    assert [finding.id for finding in findings] == ["float16-overflow"]


def test_in_one_step_and_in_a_whole_run_so_much_is_read_and_no_more(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop at one line takes a few of the readings only."""
    monkeypatch.setattr(budget, "EACH_STEP", 40)
    monkeypatch.setattr(budget, "OVERALL", 100)
    made: list[int] = []

    def work(instruments: Instruments) -> None:
        def many(_: int) -> None:
            for _ in range(200):
                torch.ones(2, device=device).exp()
            before = instruments.session.readings.made
            for _ in range(20):
                torch.ones(2, device=device).exp() + torch.ones(2, device=device).sin()
            made.append(instruments.session.readings.made - before)

        trains(device, 6, many)
        made.append(instruments.session.readings.made)

    watched(tmp_path, work)
    assert made[-1] == 100
    assert all(count <= 40 for count in made[:-1])


def test_nothing_is_read_where_torch_was_asked_to_tell_of_each_time_that_the_host_waits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that has its synchronizations counted, or refused, gets none of the doctor's."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)
    assert not Readings(lambda: 1).reads(torch.ones(2, device=device))


def test_a_rank_of_a_job_is_not_read_from(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its device may wait for another rank, whose host waits for this one; that nothing is followed there is said."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert not Readings(lambda: 1).reads(torch.ones(2, device=device))
    monkeypatch.undo()
    monkeypatch.setattr(Readings, "_may_wait", staticmethod(lambda: False))
    if device.type == "cpu":
        monkeypatch.setattr(budget, "AT_HAND", frozenset())
        monkeypatch.setattr(budget, "WAITED_FOR", AT_HAND)
        monkeypatch.setattr(sentinel, "BEHIND", AT_HAND)
    trace = watched(tmp_path, lambda _: trains(device, 1))
    assert [note.what for note in trace.all(NotWatched)] == [sentinel._NOT_FOLLOWED[0]]


def test_what_is_not_measured_overwrites_what_was_not_finite(device: torch.device, tmp_path: Path) -> None:
    """Memory that held inf in a step that was read, and holds something else since, makes no later value bad."""
    held = torch.zeros(3, device=device)

    def between(step: int) -> None:
        if step == 8:
            held.fill_(torch.inf)
        elif step == 9:
            held.fill_(1.0)
        elif step == 16:
            nn.Linear(3, 1, device=device)(held).sum().backward()

    trace = watched(tmp_path, lambda _: trains(device, 16, between))
    assert not diagnose(trace)


def test_what_a_model_is_given_by_a_backward_pass_between_modules_is_found(
    device: torch.device, tmp_path: Path
) -> None:
    """The gradient of a root at 0, between two modules: the line of the forward pass, in the thread that a GPU's nodes run in."""
    first, second = nn.Linear(2, 2, bias=False).to(device), nn.Linear(2, 1).to(device)

    def work(_: Instruments) -> None:
        root = first(torch.zeros(1, 2, device=device)).abs().sqrt()
        second(root).sum().backward()

    trace = watched(tmp_path, work)
    found = diagnose(trace)[0]
    assert (found.phase, found.op) == ("backward", "aten.div.Tensor")
    assert found.source is not None
    assert found.source.startswith("test_readings.py:")


def test_modules_that_a_node_calls_again_are_left_to_the_module_watch(device: torch.device, tmp_path: Path) -> None:
    """A checkpoint between two modules recomputes one in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    inner, outer = nn.Linear(4, 4).to(device), nn.Linear(4, 1).to(device)

    def work(_: Instruments) -> None:
        x = torch.ones(2, 4, device=device, requires_grad=True)
        outer(checkpoint(inner, x * 2, use_reentrant=True) + 1).sum().backward()

    trace = watched(tmp_path, work)
    assert not trace.all(Op)
    assert not diagnose(trace)


def test_an_update_that_bfloat16_loses_is_found_in_few_readings(device: torch.device, tmp_path: Path) -> None:
    """A merge of an adapter, in a step in which nothing else is read."""

    def work(_: Instruments) -> None:
        model = nn.Linear(16, 16, bias=False).to(device, torch.bfloat16)

        def merges(step: int) -> None:
            if step == 11:
                with torch.no_grad():
                    model.weight.fill_(1.0)
                    model(torch.ones(2, 16, device=device, dtype=torch.bfloat16))
                    model.weight += torch.full((16, 16), 1e-4, device=device, dtype=torch.bfloat16)

        trains(device, 12, merges)

    trace = watched(tmp_path, work)
    assert [finding.id for finding in diagnose(trace)] == ["update-stall"]
    assert len(observed(trace, "lost-writes")) == 1


@pytest.mark.gpu
@needs_cuda
def test_nothing_is_read_or_copied_while_a_graph_is_captured(tmp_path: Path) -> None:
    """Neither would the capture survive a reading, nor is a copy of ours to become part of it: the graph runs as often as the program likes."""
    held, given = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    made: list[int] = []

    def work(instruments: Instruments) -> None:
        (given * 2).add_(1).log()  # read
        torch.cuda.synchronize()
        made.append(instruments.session.readings.made)
        with torch.cuda.graph(graph):
            held.add_(given)
            held.mul_(2).half().square()
        made.append(instruments.session.readings.made)

    trace = watched(tmp_path, work)
    given.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert held.tolist() == [6.0] * 4
    assert made[0] == made[1] > 0
    assert not diagnose(trace)
