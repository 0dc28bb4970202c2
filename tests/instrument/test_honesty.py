"""The watch changes nothing: what a program may do while it is watched, and what is said where the watch cannot see."""

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.trace.events import WORKED_ELSEWHERE, NotWatched
from dtypedoctor.trace.lines import Lines
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.reader import read_trace
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.worker.process_watch import ProcessWatch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def not_watched(trace: Trace) -> str:
    return "\n".join(f"{note.what}: {note.why}" for note in trace.all(NotWatched))


def seen(trace: Trace) -> set[str]:
    """Names of the modules whose outputs were measured."""
    return {trace.sites[sample.site].fqn for sample in trace.samples if trace.sites[sample.site].kind == "output"}


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("method", ["write_samples", "write", "mark"])
def test_an_error_inside_the_instruments_does_not_reach_the_program(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program gets its results and gradients, and the trace says what was lost, as far as it can be written."""
    net, x = Net(), torch.randn(2, 4)
    expected = net(x).detach()

    def broken(*_: Any) -> None:
        raise RuntimeError("out of order")

    def work(instruments: Instruments) -> None:
        original = getattr(TraceWriter, method)
        monkeypatch.setattr(TraceWriter, method, broken)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        out = net(x)
        out.sum().backward()
        optimizer.step()
        monkeypatch.setattr(TraceWriter, method, original)
        assert torch.equal(out, expected)
        assert net.first.weight.grad is not None
        assert instruments.position.stack == []
        net(x)

    trace = watched(tmp_path, work)
    if method == "write":  # then not even that can be said, and the trace has no end
        assert trace.end is None
        return
    assert trace.end is not None
    assert trace.end.outcome == "completed"
    assert "RuntimeError: out of order" in not_watched(trace)


def test_a_full_disk_ends_the_recording_and_not_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing fails from some moment on: the program gets its gradients, and the trace says that it stopped, and why."""
    gradients = []

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def work(_: Instruments) -> None:
        net, x = Net(), torch.randn(2, 4)
        net(x)
        monkeypatch.setattr(Lines, "append", full)
        for _ in range(3):
            net(x).sum().backward()
            gradients.append(net.first.weight.grad)
        monkeypatch.undo()  # a disk that has room again: what was lost stays lost

    trace = watched(tmp_path, work)
    assert [gradient is not None for gradient in gradients] == [True] * 3
    assert trace.stopped is not None
    assert trace.stopped.errno == errno.ENOSPC
    assert trace.stopped.lost > 0
    assert trace.end is None
    assert seen(trace) == {"", "first", "second"}  # what was measured before


def test_a_module_that_returns_its_parameter_gets_no_hook_on_it(tmp_path: Path) -> None:
    """A hook on a leaf would stay there after the call."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.rows

    table = Table()
    watched(tmp_path, lambda _: [table() for _ in range(3)])
    assert table.rows._backward_hooks is None


def test_compiling_a_module_warns_of_no_hooks_and_its_inside_is_listed(tmp_path: Path) -> None:
    """torch.compile warns of global hooks; ours are not the user's business. Afterwards none is left."""

    def work(_: Instruments) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.compile(Net(), backend="eager")(torch.randn(2, 4))

    trace = watched(tmp_path, work)
    assert trace.end is not None
    assert trace.end.outcome == "completed"
    assert "compiled code runs no module hooks" in not_watched(trace)
    assert not modules._has_any_global_hook()


def test_a_traced_module_holds_none_of_the_measuring(tmp_path: Path) -> None:
    """torch.jit.trace and fx write down what runs; the graphs are those without the watch."""

    def graphs() -> list[str]:
        net = Net()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            recorded = torch.jit.trace(net, torch.randn(2, 4))
        return [str(recorded.graph).count("aten::"), str(fx.symbolic_trace(net).graph)]  # type: ignore[list-item]

    bare = graphs()
    found: list[list[str]] = []
    watched(tmp_path, lambda _: found.append(graphs()))
    assert found == [bare]


def test_a_torchscript_module_is_listed_as_not_watched_inside(tmp_path: Path) -> None:
    """What it returns is measured all the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.script(Net())
    trace = watched(tmp_path, lambda _: script(torch.randn(2, 4)))
    assert "TorchScript runs no module hooks" in not_watched(trace)
    assert seen(trace) == {""}


def test_transformed_and_nested_tensors_pass_unmeasured(tmp_path: Path) -> None:
    """vmap, grad and nested tensors cannot be read; the results are right and no error is reported."""
    net = nn.Linear(4, 4)
    rows = torch.randn(3, 4)

    def work(_: Instruments) -> None:
        assert torch.allclose(torch.func.vmap(net)(rows), net(rows), atol=1e-6)
        torch.func.grad(lambda x: net(x).sum())(rows[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
        assert net(nested).is_nested

    trace = watched(tmp_path, work)
    assert trace.end is not None
    assert trace.end.outcome == "completed"
    assert "dtypedoctor failed" not in not_watched(trace)


def test_the_programs_own_modes_see_only_the_program(tmp_path: Path) -> None:
    """A counter of operations counts the same, and a default device is not applied to what the watch computes."""

    class Ops(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    net, x = Net(), torch.randn(2, 4)

    def counted() -> tuple[list[str], int]:
        net.zero_grad()
        with Ops() as ops, FlopCounterMode(display=False) as flops:
            net(x).sum().backward()
        with torch.device("meta"):
            assert net(x).device.type == "cpu"
        return ops.names, flops.get_total_flops()

    bare = counted()
    found: list[tuple[list[str], int]] = []
    trace = watched(tmp_path, lambda _: found.append(counted()))
    assert found == [bare]
    assert seen(trace) == {"", "first", "second"}


def test_a_forked_child_writes_nothing_into_the_trace(tmp_path: Path) -> None:
    """A writer that a child disowns is silent there, and whole in the parent."""
    writer = TraceWriter(tmp_path)
    os.register_at_fork(after_in_child=writer.disown)
    instruments = Instruments(writer)
    instruments.start()
    net = Net()
    net(torch.randn(2, 4))
    before = (tmp_path / "events.jsonl").read_bytes(), (tmp_path / "cursor.bin").read_bytes()
    child = os.fork()
    if child == 0:
        net(torch.full((2, 4), float("nan")))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert before == ((tmp_path / "events.jsonl").read_bytes(), (tmp_path / "cursor.bin").read_bytes())
    instruments.stop()
    writer.close()


class Doubling(Dataset[Tensor]):
    """Rows that a module makes, perhaps in a data loader's worker."""

    def __init__(self) -> None:
        self.double = nn.Linear(2, 2)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        doubled: Tensor = self.double(torch.full((2,), float(index)))
        return doubled.detach()


def forked(work: Callable[[], Any]) -> None:
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def seen_of_process(directory: Path, work: Callable[[], Any]) -> Trace:
    writer = TraceWriter(directory)
    os.register_at_fork(after_in_child=writer.disown)
    watch = ProcessWatch(writer)
    watch.start()
    work()
    watch.finish(None)
    writer.close()
    return read_trace(directory)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("work", "told"),
    [
        (lambda: forked(lambda: nn.Linear(2, 2)(torch.zeros(1, 2))), True),
        (lambda: forked(lambda: torch.zeros(2, requires_grad=True).sum().backward()), True),
        (lambda: forked(lambda: torch.ones(2).half() * 2), True),
        (lambda: forked(lambda: torch.ones(2) * 2), False),
        (lambda: forked(lambda: None), False),
        (lambda: list(DataLoader(Doubling(), num_workers=1)), False),
    ],
    ids=["module", "backward", "half precision", "float32", "nothing", "data loader"],
)
def test_work_in_a_forked_child_is_told_of(work: Callable[[], Any], told: bool, tmp_path: Path) -> None:
    """Nobody measures it, so the run must not be called healthy; workers that prepare data compute in float32, and what a loader's makes is measured where it is used."""
    trace = seen_of_process(tmp_path, work)
    assert (WORKED_ELSEWHERE in not_watched(trace)) is told


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("given", "found"), [(True, "nonfinite-input"), (False, "domain-error")])
def test_a_bad_input_is_told_from_a_bad_start_in_one_run(given: bool, found: str, tmp_path: Path) -> None:
    """NaN in what the model is called with is the data's; NaN that its own code makes before the first layer is not."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x if given else x / 0.0 * 0.0))

    data = torch.from_numpy(np.full((2, 4), float("nan") if given else 1.0, dtype=np.float32))
    net = Scaled()
    trace = watched(tmp_path, lambda _: net(data).sum().backward())
    assert diagnose(trace)[0].id == found
