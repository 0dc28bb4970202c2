"""What Dynamo gave up on, counted: on small functions, and on the NF4 fast path before and after its correction."""

import ctypes
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._logging._internal as torch_logging
from torch import Tensor
from torch._dynamo.utils import counters

import dtypedoctor
from dtypedoctor.instrument.compile_events import CompileWatch, Record
from dtypedoctor.lab.tickets.nf4_compiled import Nf4CompiledConfig, build_nf4_compiled, install_custom_op
from dtypedoctor.trace.records.execution import CompileCounts, GraphBreak, Recompiled, RecompileLimit

pytestmark = pytest.mark.slow


@dataclass(frozen=True, kw_only=True)
class Run:
    """A compiled model at work: one evaluation, then training steps."""

    records: list[Record]
    losses: list[float]
    counted: int
    """Graph breaks by Dynamo's own counter."""

    @property
    def graphs(self) -> int:
        """Number of compiled graphs."""
        return next(one.unique_graphs for one in self.records if isinstance(one, CompileCounts))


def records(watch: CompileWatch) -> list[Record]:
    """What a watch says."""
    return [record for record, _ in watch.observations()]


def breaks(of: list[Record]) -> int:
    """How often a graph has broken."""
    return sum(one.count for one in of if isinstance(one, GraphBreak))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Nothing is compiled before or left after a test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens() -> Tensor:
    """(2, 12) token ids, always the same."""
    return torch.randint(4, 200, (2, 12), generator=torch.Generator().manual_seed(0))


def evaluate_then_train(call: Callable[..., object], model: torch.nn.Module, steps: int = 2) -> list[float]:
    """As a trainer does that evaluates before the first step: without gradients, then with."""
    with torch.no_grad():
        losses = [call(tokens(), labels=tokens()).loss.item()]  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(steps):
        loss = call(tokens(), labels=tokens()).loss  # type: ignore[attr-defined]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(config: Nf4CompiledConfig, *, corrected: bool, fullgraph: bool = False) -> Run:
    """Compiles with the backend that runs graphs as they are, which is enough for counting."""
    model = build_nf4_compiled(config)
    installed = install_custom_op(model, ()) if corrected else None
    torch._dynamo.reset()
    before = sum(counters["graph_break"].values())
    try:
        with CompileWatch() as watch:
            losses = evaluate_then_train(torch.compile(model, backend="eager", fullgraph=fullgraph), model)
    finally:
        if installed is not None:
            installed.undo()
    return Run(records=records(watch), losses=losses, counted=sum(counters["graph_break"].values()) - before)


def broken(x: Tensor) -> Tensor:
    """One graph before the break and one after it; both depend on the shape."""
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2


@pytest.fixture(scope="module")
def faulty() -> Run:
    """The fast path as it is."""
    return run(Nf4CompiledConfig(), corrected=False)


def audited_between(x: Tensor) -> Tensor:
    """Python calls all audit hooks of the process between its two graphs."""
    x = x + 1
    sys.audit("something")
    return x * 2


def test_a_watch_that_is_over_leaves_no_frame_to_compile(tmp_path: Path) -> None:
    """Its audit hook stays for good and is called inside of compiled functions; Dynamo compiles neither it nor what it calls."""
    with dtypedoctor.watch(out=tmp_path / "run"):
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    torch._dynamo.reset()
    before = dict(counters["frames"])
    torch.compile(audited_between, backend="eager")(torch.ones(2))
    assert [counters["frames"][name] - before.get(name, 0) for name in ("total", "ok")] == [2, 2]


@pytest.mark.release
def test_a_compiled_optimizer_step_has_nothing_of_the_watch_in_its_graph(tmp_path: Path) -> None:
    """Dynamo inlines the hooks of optimizers: what watches is neither compiled with the step nor a reason to break it."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    torch._dynamo.reset()
    with dtypedoctor.watch(out=tmp_path / "run"), CompileWatch() as watch:
        for _ in range(3):
            weight.grad = torch.ones(4)
            step()
    assert weight.tolist() == [-0.5] * 4
    found = records(watch)
    assert not any("dtypedoctor" in frame for one in found if isinstance(one, GraphBreak) for frame in one.frames)
    assert not any(isinstance(one, RecompileLimit) for one in found)


def test_a_break_inside_the_standard_library_is_at_the_line_that_called_it() -> None:
    """`ctypes` looks a C function up in Python code of its own."""
    library = ctypes.CDLL(None)

    def absolute(x: Tensor) -> Tensor:
        library.abs(ctypes.c_int(3))
        return x.abs()

    def outer(
        x: Tensor,
    ) -> Tensor:  # 2.9 leaves a function that breaks there out as a whole, and reports it in its caller alone
        return absolute(x) + 1

    with CompileWatch() as watch:
        torch.compile(outer, backend="eager")(torch.ones(2))
    found = [one for one in records(watch) if isinstance(one, GraphBreak)]
    assert found
    assert all(Path(__file__).name in one.frames[-1] for one in found)


def test_equal_breaks_are_one_entry_with_a_count() -> None:
    """Dynamo prints the stack of equal breaks once; the watch has it each time."""

    with CompileWatch() as watch:
        compiled = torch.compile(broken, backend="eager", dynamic=False)
        for size in (2, 3, 4):
            compiled(torch.ones(size))
    (group,) = (one for one in records(watch) if isinstance(one, GraphBreak))
    assert group.count == 3
    assert group.frames[-1].endswith(" broken")


def test_graph_breaks_outside_of_the_watch_are_not_reported() -> None:
    """Breaks before entering and after leaving belong to others."""

    compiled = torch.compile(broken, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    with CompileWatch() as watch:
        compiled(torch.ones(3))
        assert breaks(records(watch)) == 1
    compiled(torch.ones(4))
    assert breaks(records(watch)) == 1
    recompiled = [one.count for one in records(watch) if isinstance(one, Recompiled)]
    assert recompiled == [1, 1], "the function and its rest after the break"


def test_listening_prints_nothing_and_is_put_back(capfd: pytest.CaptureFixture[str]) -> None:
    """Levels, propagation, handlers and the list of enabled logs are what they were."""
    names = [n for n in logging.root.manager.loggerDict if n.endswith((".__graph_breaks", ".__recompiles"))]
    names.append("torch._dynamo.convert_frame")

    def state() -> list[tuple[object, ...]]:
        loggers = map(logging.getLogger, names)
        return [(log.level, log.propagate, tuple(log.handlers)) for log in loggers]

    before, enabled = state(), set(torch_logging.log_state.artifact_names)

    with CompileWatch() as watch:
        compiled = torch.compile(broken, backend="eager", dynamic=False)
        compiled(torch.ones(2))
        compiled(torch.ones(3))
    assert breaks(records(watch)) == 2
    captured = capfd.readouterr()
    assert "raph break" not in captured.err + captured.out
    assert "ecompil" not in captured.err + captured.out
    assert (state(), set(torch_logging.log_state.artifact_names)) == (before, enabled)


def test_a_users_own_compile_logs_stay_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    """What TORCH_LOGS asked for is still printed."""
    torch._logging.set_logs(graph_breaks=True)
    try:
        with CompileWatch() as watch:
            torch.compile(broken, backend="eager")(torch.ones(2))
        assert torch_logging.log_state.is_artifact_enabled("graph_breaks")
        assert breaks(records(watch)) == 1
        assert "Graph break in user code" in capfd.readouterr().err
    finally:
        torch._logging.set_logs()


@pytest.mark.release
def test_the_watch_does_not_change_the_number_of_breaks(faulty: Run) -> None:
    """Dynamo's own counters after the same run without it."""
    model = build_nf4_compiled(Nf4CompiledConfig())
    torch._dynamo.reset()
    before, graphs = sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]
    losses = evaluate_then_train(torch.compile(model, backend="eager"), model)
    assert sum(counters["graph_break"].values()) - before == faulty.counted
    assert counters["stats"]["unique_graphs"] - graphs == faulty.graphs
    assert losses == faulty.losses


@pytest.mark.release
@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_corrected_path_is_one_graph_per_mode(faulty: Run, fullgraph: bool) -> None:
    """No break, no limit; one graph without and one with gradients, and the same losses to the last bit."""
    corrected = run(Nf4CompiledConfig(), corrected=True, fullgraph=fullgraph)
    (recompiled,) = (one for one in corrected.records if not isinstance(one, CompileCounts))
    assert isinstance(recompiled, Recompiled)
    assert (recompiled.count, recompiled.guards) == (1, ["GLOBAL_STATE changed: grad_mode"])
    assert corrected.graphs == 2
    assert corrected.losses == faulty.losses


@pytest.mark.release
def test_a_recompiled_function_is_told_with_its_place_and_the_guards_that_failed(faulty: Run) -> None:
    """From the top of its package on."""
    (helper,) = (one for one in faulty.records if isinstance(one, Recompiled) and one.function == "get_ptr")
    assert helper.place.startswith("bitsandbytes/functional.py:")
    assert "tensor 'A' dtype mismatch. expected Float, actual Byte" in str(helper.guards)
    assert any(isinstance(one, RecompileLimit) for one in faulty.records)
