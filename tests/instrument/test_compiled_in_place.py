"""The module watch on modules that ``nn.Module.compile()`` has compiled in place: torch calls them past the hooks of modules."""

import copy
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor._torch_private import is_followed
from dtypedoctor.analysis import analysis_of
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.trace.events import Coverage, NotWatched, Raised, Root
from dtypedoctor.trace.model import Trace


class Net(nn.Module):
    """Two linears with a product between them; optionally a graph break before it."""

    def __init__(self, gain: float = 1.0, *, breaks: bool = False) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)
        self.gain = gain
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.narrow(x * self.gain)


class Stack(nn.Module):
    """Some of these in a row, each compiled in place."""

    def __init__(self, *blocks: Net) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        for block in blocks:
            block.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()


def in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="eager")
    return net


def outputs(trace: Trace) -> list[str]:
    """Names of the modules whose outputs were measured, once for each time."""
    return [trace.sites[sample.site].fqn for sample in trace.samples if trace.sites[sample.site].kind == "output"]


def coverage(trace: Trace) -> Coverage:
    """What ran, and what of it was measured."""
    found = trace.last(Coverage)
    assert found is not None
    return found


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_module_compiled_in_place_is_an_outermost_call(tmp_path: Path, when: str) -> None:
    """Whether it was compiled before the watch begins or after, its output is measured and its inside is listed as not covered."""
    net = Net()
    if when == "before":
        in_place(net)

    def work(_: Instruments) -> None:
        if when == "during":
            in_place(net)
        for _ in range(2):
            net(torch.randn(4, 8)).sum().backward()

    trace = watched(tmp_path, work)
    assert [root.cls for root in trace.all(Root)] == ["Net"]
    assert outputs(trace) == ["", ""]
    assert {sample.call for sample in trace.samples if trace.sites[sample.site].kind == "output"} == {1, 2}
    assert {site.kind for site in trace.sites.values()} >= {"grad_output", "loss"}
    assert (coverage(trace).module_calls, coverage(trace).module_calls_measured) == (2, 2)
    assert {"the inside of Net"} <= {note.what for note in trace.all(NotWatched)}


def test_a_bad_value_that_it_makes_is_its_output_of_finite_inputs(tmp_path: Path) -> None:
    """The module is named where inf or NaN is first seen, and its input was measured."""
    net = in_place(Net(1e6).half())
    trace = watched(tmp_path, lambda _: net(torch.randn(4, 8).half()))
    found = analysis_of(trace).first_nonfinite
    assert found is not None
    assert (found[1].kind, found[1].fqn, found[1].cls) == ("output", "", "Net")
    assert [sample.finite for sample in trace.samples if trace.sites[sample.site].kind == "input"] == [True]


def test_everything_is_put_back_when_the_watch_stops(tmp_path: Path) -> None:
    """The compiled code is what torch put there, of modules compiled before the watch and in it, and compiling is torch's own."""
    early, late, method = in_place(Net()), Net(), nn.Module.compile
    compiled = early._compiled_call_impl
    followed: list[bool] = []

    def work(_: Instruments) -> None:
        in_place(late)
        followed.extend((is_followed(early), is_followed(late)))

    watched(tmp_path, work)
    assert followed == [True, True]
    assert early._compiled_call_impl is compiled
    assert not is_followed(late)
    assert late._compiled_call_impl is not None
    assert nn.Module.compile is method
    assert torch.equal(late(torch.ones(1, 8)), copy.deepcopy(late)(torch.ones(1, 8)))


def test_a_module_that_is_compiled_anew_or_not_any_more_is_left_so(tmp_path: Path) -> None:
    """The program may take the compiled code away while it is watched: hooks see the calls then, inner ones too."""
    net = in_place(Net())

    def work(_: Instruments) -> None:
        in_place(net)
        net(torch.randn(2, 8))
        net._compiled_call_impl = None
        net(torch.randn(2, 8))

    assert sorted(outputs(watched(tmp_path, work))) == ["", "", "narrow", "wide"]
    assert net._compiled_call_impl is None


def test_copies_and_pickles_hold_nothing_of_the_watch(tmp_path: Path) -> None:
    """A copy is not compiled, as torch has it, and the attributes are those of an unwatched module."""

    def work(_: Instruments) -> None:
        net = in_place(Net())
        net(torch.randn(2, 8))
        copied, loaded = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
        assert set(vars(copied)) == set(vars(loaded)) == set(vars(net)) - {"_compiled_call_impl"}
        assert net._compiled_call_impl.get_compiler_config is not None

    trace = watched(tmp_path, work)
    assert trace.end is not None
    assert trace.end.outcome == "completed"


def alone() -> Any:
    """A module compiled in place."""
    return in_place(Net(breaks=True))


def inside_of_a_compiled_one() -> Any:
    return torch.compile(Stack(Net(), Net()), backend="eager")


def after_a_graph_break() -> Any:
    """A module compiled in place that a compiled function calls after a graph break."""
    net = in_place(Net())

    @torch.compile(backend="eager")
    def function(x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return net(x) + 1

    return function


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("make", [alone, inside_of_a_compiled_one, after_a_graph_break, lambda: Stack(Net(), Net())])
def test_the_watch_changes_no_graph_break_recompilation_result_or_gradient(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    """Graphs, graph breaks and recompilations, results and gradients are those without the watch."""

    def run() -> tuple[dict[str, int], dict[str, int], list[Tensor]]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        called = make()
        found = []
        for size in (2, 2, 3):
            x = torch.randn(size, 8, requires_grad=True)
            found.append(called(x))
            found[-1].square().sum().backward()
            found.append(x.grad)
        counters = torch._dynamo.utils.counters
        return dict(counters["stats"]), dict(counters["graph_break"]), found

    bare = run()
    seen: list[Any] = []
    watched(tmp_path, lambda _: seen.append(run()))
    assert seen[0][:2] == bare[:2]
    assert all(torch.equal(one, other) for one, other in zip(seen[0][2], bare[2], strict=True))


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("every", [1, 2])
def test_a_call_that_runs_uncompiled_is_seen_once_and_so_is_its_inside(tmp_path: Path, every: int) -> None:
    """Where Dynamo leaves a call alone, torch's hooks tell of it as well."""
    net = Stack(Net(), Net())

    def work(instruments: Instruments) -> None:
        with torch.compiler.set_stance("force_eager"):
            for _ in range(2):
                net(torch.randn(2, 8)).sum().backward()
                instruments.position.step += 1

    trace = watched(tmp_path, work, every=every)
    inside = [f"blocks.{i}{name}" for i in (0, 1) for name in (".wide", ".narrow", "")]
    whole, thin = [*inside, ""], [*inside, ""] if every == 1 else []
    assert outputs(trace) == whole + thin
    skipped = len(whole) - len(thin)
    assert (coverage(trace).module_calls, coverage(trace).module_calls_skipped) == (14 - skipped, skipped)
    calls = {sample.call for sample in trace.samples if trace.sites[sample.site].kind == "output"}
    assert calls == ({1, 2} if every == 1 else {1})


def test_an_exception_is_noted_at_the_module_and_the_next_call_is_outermost(tmp_path: Path) -> None:
    """Also where the exception is none that torch tells its hooks of."""

    net, ends = in_place(Net().half()), in_place(nn.Sequential(Ends()))

    def work(_: Instruments) -> None:
        with pytest.raises(KeyboardInterrupt), torch.compiler.set_stance("force_eager"):
            ends(torch.ones(1))
        net(torch.randn(2, 8).half())
        with torch.compiler.set_stance("force_eager"):
            net(torch.randn(2, 8))

    trace = watched(tmp_path, work)
    raised = trace.last(Raised)
    assert raised is not None
    assert raised.modules == ["", "wide"]
    assert outputs(trace) == [""]
    assert raised.call == 3


class Ends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


class Catches(nn.Module):
    """Gets past an interruption of a module in it, then calls two that it does not hold, one of them compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = Ends()
        self.apart = [in_place(nn.Linear(8, 8))]

    def forward(self, x: Tensor) -> Tensor:
        with suppress(KeyboardInterrupt):
            self.ends(x)
        return self.apart[0](nn.Tanh()(x))


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("make", [Catches, lambda: in_place(Catches())], ids=["hooks", "in place"])
def test_calls_are_known_to_be_open_or_over(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    """torch's own frames show it, of which a call that is compiled in place has none yet where it begins, and one where it runs."""
    net = make()

    def work(_: Instruments) -> None:
        with torch.compiler.set_stance("force_eager"):
            net(torch.randn(2, 8))

    trace = watched(tmp_path, work)
    assert outputs(trace) == ["Tanh()", "Linear()", ""]
    assert [root.cls for root in trace.all(Root)] == ["Catches"]


@pytest.mark.release
def test_compiled_functions_outside_of_modules_are_counted_and_listed(tmp_path: Path) -> None:
    """What they call is not measured. One inside of a module call is covered by that, and one that runs uncompiled is no such call."""
    net, wrapped, placed = Net(), torch.compile(Net(), backend="eager"), in_place(Net())

    @torch.compile(backend="eager")
    def function(x: Tensor) -> Tensor:
        return net(x) * 2

    def work(_: Instruments) -> None:
        for called in (wrapped, placed, Stack(Net())):
            called(torch.randn(2, 8)).sum().backward()
        with torch.compiler.set_stance("force_eager"):
            function(torch.randn(2, 8))
        for _ in range(3):
            function(torch.randn(2, 8)).sum().backward()

    trace = watched(tmp_path, work)
    assert coverage(trace).compiled_outside == 3
    listed = [note.what for note in trace.all(NotWatched) if note.why.startswith("compiled code runs no module hooks")]
    assert "the inside of compiled functions that were called outside of modules" in listed
