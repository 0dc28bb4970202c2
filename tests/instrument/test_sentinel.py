"""The operator sentinel: where it is on, what it leaves as it was, and what it costs, counted."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.instrument import phases, sentinel
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.instrument.sentinel import Sentinel
from dtypedoctor.trace.events import Coverage, NotWatched, Op
from dtypedoctor.trace.records.execution import NonfiniteReached


class Counting(TorchDispatchMode):
    """A mode of a program's own, which counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Asking(nn.Module):
    """Says which modes are on inside of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
        return x * 2


def coverage_of(directory: Path, work: Any) -> Coverage:
    """How much of the operators outside of modules was measured."""
    found = watched(directory, work).last(Coverage)
    assert found is not None
    return found


def test_modes_of_the_program_are_entered_and_left_as_without_it(tmp_path: Path) -> None:
    """A mode that is on across a module call sees all operators, and comes off the stack where the program leaves it."""
    mine, module = Counting(), Asking()

    def work(_: Instruments) -> None:
        for _ in range(3):
            module(torch.ones(2))
        mine.seen.clear()
        with mine:
            x = torch.ones(2).exp()
            module(x)
            with Counting() as inner:
                x.sin()
            x.cos()
        x.tan()
        assert inner.seen == ["aten.sin.default"]
        assert [type(mode) for mode in _get_current_dispatch_mode_stack()] == [Sentinel]

    trace = watched(tmp_path, work)
    assert mine.seen == [
        f"aten.{name}" for name in ("ones.default", "exp.default", "mul.Tensor", "sin.default", "cos.default")
    ]
    assert module.modes == ["Counting"]
    found = trace.last(Coverage)
    assert found is not None
    assert found.operators == 3 + 5


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("heard", ["its end", "no beginning", "both"])
def test_operators_are_seen_again_after_a_profiler(tmp_path: Path, heard: str) -> None:
    """Also after one that began before the watch, or could not begin."""
    before = torch.autograd.profiler.profile()
    if heard == "its end":
        before.__enter__()

    def work(_: Instruments) -> None:
        if heard == "its end":
            before.__exit__(None, None, None)
        elif heard == "no beginning":
            with pytest.raises(TypeError):
                torch.autograd.profiler._enable_profiler()
        else:
            with torch.profiler.profile():
                torch.ones(2).log()
        (torch.full((2,), 300.0).half() * 300).sum().item()

    assert [finding.op for finding in diagnose(watched(tmp_path, work))] == ["aten.mul.Tensor"]


def test_an_operator_that_writes_to_what_it_reads_is_recorded_with_what_it_was_given(tmp_path: Path) -> None:
    """In ``b.mul_(b)`` both operands hold the result by the time that it is known to be infinite."""

    def work(_: Instruments) -> None:
        b = torch.full((4,), 300.0).half()
        b.mul_(b).clamp_(max=100)

    made = next(op for op in watched(tmp_path, work).all(Op) if op.op == "aten.mul_.Tensor")
    assert [operand.absmax for operand in made.inputs] == [300.0, 300.0]
    assert made.outputs[0].num_posinf == 4


def test_a_value_dies_when_the_program_lets_go_of_it(tmp_path: Path) -> None:
    """Neither a tensor that is finite nor one that is not lives longer than without the sentinel, and no graph does."""
    import weakref

    def work(_: Instruments) -> None:
        w = torch.zeros(3, requires_grad=True)
        loss = torch.log(w).sum()
        loss.backward()
        held = [weakref.ref(loss), weakref.ref(loss.grad_fn)]
        del loss
        assert [ref() for ref in held] == [None, None]

    assert watched(tmp_path, work).all(Op)


def test_the_sentinel_leaves_when_compiled_code_runs_where_torch_would_compile_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a torch that cannot leave a mode on beside compiled code, operators are watched until some runs, and that is told."""
    monkeypatch.setattr(phases, "MODES_CAN_IGNORE_COMPILED", False)
    modes: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        modes.append(len(_get_current_dispatch_mode_stack()))
        return graph.forward

    def work(_: Instruments) -> None:
        f = torch.compile(lambda x: x.sin() + 1, backend=backend)
        torch.log(-torch.ones(3)).sum()
        for _ in range(3):
            f(torch.ones(3))
        modes.append(len(_get_current_dispatch_mode_stack()))

    trace = watched(tmp_path, work)
    torch._dynamo.reset()
    assert modes == [0, 0]
    assert "aten.log.default" in {op.op for op in trace.all(Op)}
    told = {note.what: note.why for note in trace.all(NotWatched)}
    assert told["operators outside of modules, since compiled code has run"] == (
        "this torch would recompile it at each call; torch 2.10 or later measures them"
    )


def test_beyond_its_allowance_it_measures_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loop that never ends each eighth turn is measured, once the allowance is spent; losses and numbers always."""
    monkeypatch.setattr(sentinel, "ALLOWANCE", 100)

    def work(_: Instruments) -> None:
        x = torch.ones(3)
        for _ in range(5000):
            x = x * 1.0
        torch.log(-x).sum().item()

    found = coverage_of(tmp_path, work)
    assert found.operators >= 5000
    assert 650 < found.operators_measured < 850


def test_one_backward_pass_in_eight_is_seen_beyond_the_allowance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators of the others do not come through Python at all; every gradient is measured."""
    monkeypatch.setattr(sentinel, "ALLOWANCE", 0)
    mine: list[int] = []

    def work(_: Instruments) -> None:
        w = torch.ones(3, requires_grad=True)
        for _ in range(16):
            w.register_hook(lambda _: mine.append(len(_get_current_dispatch_mode_stack())))
            (w * 2).sum().backward()
            w._backward_hooks.clear()

    found = coverage_of(tmp_path, work)
    assert sum(mine) == 2
    assert (found.gradients, found.gradients_measured) == (16, 16)


def test_a_program_that_is_nan_for_ever_leaves_few_records(tmp_path: Path) -> None:
    """What repeats itself is recorded a few times; the records of hundreds of bad steps fit into some pages."""

    def work(_: Instruments) -> None:
        w = torch.tensor([float(-1)], requires_grad=True)
        for _ in range(300):
            loss = torch.log(w).sum() * 2
            loss.backward()
            with torch.no_grad():
                w -= w.grad * 0.1
            loss.item()

    trace = watched(tmp_path, work)
    assert len(trace.all(Op)) < 60
    assert len([o for o in trace.observed(NonfiniteReached) if o.what.what == "item"]) <= 3
    assert [(f.id, f.op) for f in diagnose(trace)] == [("domain-error", "aten.log.default")]


def test_gradients_are_measured_where_nothing_steps(tmp_path: Path) -> None:
    """A backward pass without an optimizer, and ``torch.autograd.grad``, leave gradients that count as measured."""

    def work(_: Instruments) -> None:
        model = nn.Linear(2, 1)
        model(torch.ones(1, 2)).sum().backward()
        w = torch.ones(2, requires_grad=True)
        torch.autograd.grad((w * 2).sum(), w)

    trace = watched(tmp_path, work)
    found = trace.last(Coverage)
    assert found is not None
    assert (found.gradients, found.gradients_measured) == (3, 3)
    names = {site.fqn for site in trace.sites.values() if site.kind == "accumulated"}
    assert names == {"weight", "bias", "gradient 0"}


def test_gradients_of_a_reentrant_checkpoint_are_measured_where_nothing_steps(tmp_path: Path) -> None:
    """The pass inside of the backward pass leaves them, from a graph that the loss does not reach."""

    def work(_: Instruments) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        given = torch.ones(1, 2, requires_grad=True)
        checkpoint(model, given, use_reentrant=True).sum().backward()

    trace = watched(tmp_path, work)
    found = trace.last(Coverage)
    assert found is not None
    assert (found.gradients, found.gradients_measured) == (5, 5)
    names = {site.fqn for site in trace.sites.values() if site.kind == "accumulated"}
    assert names == {"0.weight", "0.bias", "1.weight", "1.bias", "leaf 0"}


def test_a_parameter_that_is_overwritten_between_two_calls_is_blamed_on_the_line(tmp_path: Path) -> None:
    """A module whose weight a plain operator has made inf is not where the inf comes from."""

    def work(_: Instruments) -> None:
        model = nn.Linear(2, 2).half()
        with torch.no_grad():
            model.weight.fill_(6e4)
            model.weight.add_(torch.full((2, 2), 6e4, dtype=torch.float16))
        model(torch.ones(1, 2).half())

    first = diagnose(watched(tmp_path, work))[0]
    assert (first.id, first.op) == ("float16-overflow", "aten.add_.Tensor")
    assert first.source is not None
    assert first.source.startswith("test_sentinel.py:")


def test_a_result_that_is_too_large_to_be_measured_is_not_counted_as_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the byte allowance leaves out is seen, and not said to be finite."""
    monkeypatch.setattr(sentinel, "BYTES", 0)
    monkeypatch.setattr(sentinel, "SMALL", 64)
    coverage = coverage_of(tmp_path, lambda _: torch.ones(4096).mul(2.0).sum())
    assert (coverage.operators, coverage.operators_measured) == (3, 1)


def test_a_loss_of_a_class_of_the_programs_own_is_read_without_running_its_code(tmp_path: Path) -> None:
    """Neither ``__torch_function__`` of a subclass nor a mode of the program sees that the watch reads the loss."""

    class Counted(torch.Tensor):
        calls: ClassVar[list[str]] = []

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.calls.append(str(func))
            return super().__torch_function__(func, types, args, kwargs)

    def work(_: Any) -> list[str]:
        Counted.calls.clear()
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Counting() as mode:
            loss = model(torch.ones(1, 2)).as_subclass(Counted).sum()
            loss.backward()
            optimizer.step()
        seen.append([*Counted.calls, *mode.seen])
        return seen[-1]

    seen: list[list[str]] = []
    work(None)
    watched(tmp_path, work)
    assert seen[0] == seen[1]
    assert any("sum" in call for call in seen[0])


class Squared(torch.autograd.Function):
    """A custom function whose backward divides zero by zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 * x * (x / x)  # 0/0, custom


def _zero(x: torch.Tensor) -> torch.Tensor:
    """0, which depends on ``x``."""
    return x - x.detach()


def _root_in_the_loss(x: torch.Tensor) -> torch.Tensor:
    h = _zero(nn.Linear(4, 3)(x))
    distance = (h * h).sum(-1)
    return distance.sqrt().mean()  # bad


def _root_before_another_module(x: torch.Tensor) -> torch.Tensor:
    h = _zero(nn.Linear(4, 3)(x))
    h = h + (h * h).sum(-1, keepdim=True).sqrt()  # bad
    return nn.Linear(3, 2)(h.view(-1, 3)).square().mean()


def _root_before_a_criterion(x: torch.Tensor) -> torch.Tensor:
    h = _zero(nn.Linear(4, 3)(x))
    h = h.pow(2).sum(-1).sqrt()  # bad
    return nn.MSELoss()(h, torch.ones_like(h))


def _root_two_modules_back(x: torch.Tensor) -> torch.Tensor:
    h = _zero(nn.Linear(4, 3)(x))
    h = h.expand(2, -1, -1).pow(2).sum(-1, keepdim=True).sqrt()  # bad
    h = nn.Linear(1, 2)(h)
    return nn.Linear(2, 2)(h * 2).mean()


def _own_function(x: torch.Tensor) -> torch.Tensor:
    h = Squared.apply(_zero(nn.Linear(4, 3)(x)))
    return nn.Linear(3, 2)(h).mean()


def _half_overflow(x: torch.Tensor) -> torch.Tensor:
    h = nn.Linear(4, 3).half()(x.half())
    return (h * 40000).float().mul(300).sum()  # bad


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    "loss_of",
    [_root_in_the_loss, _root_before_another_module, _root_before_a_criterion, _root_two_modules_back, _own_function, _half_overflow],
)  # fmt: skip
def test_a_gradient_that_goes_bad_between_modules_is_named_by_operator_and_line(tmp_path: Path, loss_of: Any) -> None:
    """One run is enough: nobody opens an op trace. The operator is that of the backward pass, the line the forward one."""

    def work(_: Instruments) -> None:
        torch.manual_seed(0)
        for _ in range(2):
            nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()  # another graph, of which nothing is left
        loss_of(torch.randn(5, 4)).backward()

    found = diagnose(watched(tmp_path, work))[0]
    lines = Path(__file__).read_text().splitlines()
    marked = [i for i, line in enumerate(lines, 1) if line.endswith(("# bad", "# 0/0, custom"))]
    assert found.source is not None, found
    assert str(found.op).startswith("aten."), found
    assert found.phase == "backward"
    assert int(found.source.rpartition(":")[2]) in marked


def test_gradients_that_overflow_between_modules_and_are_thrown_away_are_nobodys_fault(tmp_path: Path) -> None:
    """A loss scale of the program's own starts too high: no optimizer ever gets what it made of the gradients."""

    def work(_: Instruments) -> None:
        model = nn.Linear(4, 3).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scale = 2.0**30
        for _ in range(12):
            (model(torch.ones(2, 4).half()).float().sum() * scale).backward()
            if all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters()):
                optimizer.step()
            else:
                scale /= 8
            optimizer.zero_grad()

    assert diagnose(watched(tmp_path, work)) == ()


def test_modes_are_as_they_were_after_a_backward_pass_that_fails(tmp_path: Path) -> None:
    """An exception leaves an operator's backward while the sentinel is on for it; the program's own mode is where it was."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            raise ValueError("by the program")

    stacks: list[Any] = []
    mine = Counting()

    def work(_: Instruments) -> None:
        layer = nn.Linear(4, 3)
        with mine:
            for _ in range(2):
                with pytest.raises(ValueError, match="by the program"):
                    (Failing.apply(layer(torch.ones(2, 4)) * 2) * 3).sum().backward()
                stacks.append([type(mode) for mode in _get_current_dispatch_mode_stack()])
                (layer(torch.ones(2, 4)) * 2).sum().backward()
                stacks.append([type(mode) for mode in _get_current_dispatch_mode_stack()])
        stacks.append([type(mode) for mode in _get_current_dispatch_mode_stack()])

    watched(tmp_path, work)
    assert stacks == [[Sentinel, Counting]] * 4 + [[Sentinel]]
    assert _get_current_dispatch_mode_stack() == []


def test_in_a_backward_pass_operators_of_modules_run_without_the_sentinel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are recomputed included, with and without reentrant autograd."""
    seen: list[tuple[str, bool]] = []
    looked = Sentinel.__torch_dispatch__

    def look(self: Sentinel, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        if node is not None:
            seen.append((node.name(), bool(self._position.stack)))
        return looked(self, func, types, args, kwargs)

    monkeypatch.setattr(Sentinel, "__torch_dispatch__", look)

    def work(_: Instruments) -> None:
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        for reentrant in (False, True):
            x = torch.ones(2, 4, requires_grad=True)
            h = torch.utils.checkpoint.checkpoint(block, x.cos(), use_reentrant=reentrant)
            (block(h.sin()) * 2).sum().backward()

    watched(tmp_path, work)
    names = {name for name, _ in seen}
    assert names >= {"MulBackward0", "SinBackward0", "CosBackward0"}
    assert not names & {"AddmmBackward0", "TanhBackward0"}
    assert not any(inside for _, inside in seen)


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    ("made", "named"),
    [
        (lambda: torch.eye(4).to_sparse_csr() * 2, ["sparse tensors (sparse_csr) outside of modules"]),
        (lambda: torch.eye(4).to_sparse() * 2, ["sparse tensors (sparse_coo) outside of modules"]),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]) * 2, ["nested tensors outside of modules"]),
        (lambda: torch.eye(4) * 2, []),
        (lambda: torch.empty(4, device="meta") * 2, []),
    ],
    ids=["rows", "coordinates", "nested", "plain", "meta"],
)
def test_tensors_that_are_not_read_outside_of_modules_are_named(tmp_path: Path, made: Any, named: list[str]) -> None:
    """A count of operators alone does not tell what was left out."""
    trace = watched(tmp_path, lambda _: made())
    assert [note.what for note in trace.all(NotWatched)] == named
