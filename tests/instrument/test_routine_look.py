"""The routine look: what it sees in a call, and that it leaves the call alone."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from observed import observed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.silent.look import RoutineLook, Seen
from dtypedoctor.trace.events import NotWatched, Observation
from dtypedoctor.trace.writer import TraceWriter


class Apply(nn.Module):
    """A module that does one thing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def seen(directory: Path, kind: str, function: Callable[..., Any], *args: Any) -> list[Observation]:
    """What is observed of one kind while a module does ``function`` once."""
    trace = watched(directory, lambda _: Apply(function)(*args))
    assert not trace.all(NotWatched)
    return observed(trace, kind)


def rms_norm(x: Tensor) -> Tensor:
    """Squares in the dtype of its input."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def binned(x: Tensor) -> Tensor:
    """Uses the number of a bin to look up and to compute with."""
    number = (x * 7).long()
    return torch.randn(9)[number] * number.float()


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("hide", [torch.nan_to_num, lambda y: torch.where(torch.isfinite(y), y, 0)])
def test_an_overflow_that_training_leads_to_is_looked_at_in_the_next_call(
    tmp_path: Path, hide: Callable[[Tensor], Tensor]
) -> None:
    """The calls that are looked at anyway are long over then, and what replaces the inf hides it from the loss."""
    inner = Apply(lambda x, size: (x * size) * (x * size))
    model = Apply(lambda x, size: hide(inner(x, size)))
    model.inner = inner
    x = torch.full((4,), 10.0).half()
    trace = watched(tmp_path, lambda _: [model(x, size) for size in (1, 1, 1, 1, 40, 40, 40)])
    (one,) = observed(trace, "absorbed")
    assert (one.call, one.values["born"]["op"], one.values["rescued"]) == (6, "aten.mul.Tensor", 4)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("zeroed", [False, True])
def test_a_step_in_which_every_gradient_is_zero_has_the_next_call_looked_at(tmp_path: Path, zeroed: bool) -> None:
    """Squares that overflow in a divisor leave zeros that are finite; a loss that is zero by itself leaves nothing to be found."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 8).half()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    norm = Apply(lambda x: x / x.pow(2).sum(-1, keepdim=True).sqrt())
    model = nn.Sequential(layer, norm)
    x, weight = torch.randn(4, 8).half(), torch.randn(8).half()

    def train(_: object) -> None:
        for step in range(8):
            grown = step >= 4
            hidden = model(x * (3000 if grown and not zeroed else 1))
            loss = (hidden @ weight).float().sum() * (0 if grown and zeroed else 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    trace = watched(tmp_path, train)
    assert [one.step for one in observed(trace, "absorbed")] == ([] if zeroed else [6])


def clamped_as_in_t5(x: Tensor) -> Tensor:
    """A test for inf chooses the bounds of a clamp; the clamp is what takes the inf out."""
    x = x * x
    largest = torch.finfo(x.dtype).max
    bound = torch.where(torch.isinf(x).any(), largest - 1000, largest)
    return torch.clamp(x, min=-bound, max=bound)


def test_a_test_for_inf_that_only_chooses_a_bound_rescues_nothing_and_the_clamp_behind_it_does(tmp_path: Path) -> None:
    """One of three elements is replaced, and by the clamp; a count of 0 is never a rescue."""
    trace = watched(tmp_path, lambda _: Apply(clamped_as_in_t5)(torch.tensor([1.0, 400.0, 2.0]).half()))
    (found,) = [f for f in diagnose(trace) if f.id == "silent-rescue"]
    assert (found.op, found.confidence) == ("aten.clamp.Tensor", "proven")
    assert "replaces 1 inf or NaN element with finite values" in found.summary
    assert found.proven_by is not None
    assert "float32" in found.proven_by


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    "work",
    [
        lambda x: (x.masked_fill(x > 0, -torch.inf) + x).softmax(-1),
        lambda x: torch.log(x - x).clamp(min=-5),
        lambda x: (x / 8).clamp(0, 6),
        lambda x: torch.nan_to_num(x),
    ],
    ids=["mask", "logarithm of zero", "relu6", "idle net"],
)
def test_what_was_asked_for_or_fails_in_float32_too_is_not_observed(
    tmp_path: Path, work: Callable[[Tensor], Tensor]
) -> None:
    """A mask, the logarithm of zero, a ReLU6, and a net that catches nothing."""
    assert seen(tmp_path, "absorbed", work, torch.arange(1.0, 9.0).view(2, 4).half()) == []


def test_an_activation_cast_to_int_and_back_is_observed(tmp_path: Path) -> None:
    """As by `x.to(weight.dtype)` with a packed weight."""
    (one,) = seen(tmp_path, "float-to-int", lambda x: x.to(torch.uint8).to(x.dtype) * 2, torch.randn(64))
    assert (one.values["from"], one.values["to"], one.values["used_by"]) == (
        "float32",
        "uint8",
        "aten._to_copy.default",
    )
    assert one.values["relative_error"] > 1


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    "work",
    [
        lambda x: nn.functional.embedding((x * 7).long(), torch.randn(7, 3)),
        lambda x: x * 8 - (x * 8).floor().long(),
        lambda x: (torch.arange(64) < (x * 64).long()).float(),
        binned,
    ],
    ids=["token ids", "whole numbers", "lengths", "bins"],
)
def test_integers_that_look_something_up_are_compared_or_are_whole_already_are_not_observed(
    tmp_path: Path, work: Callable[[Tensor], Tensor]
) -> None:
    """Bins, lengths and token ids lose their fractions on purpose."""
    assert seen(tmp_path, "float-to-int", work, torch.rand(64)) == []


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


CLIPPING = pytest.mark.skipif(
    bool(torch.tensor([1e5]).to(E4M3).float().isnan()),
    reason="this torch makes NaN of what is too large for float8_e4m3fn",
)


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    ("size", "dtype", "lost"),
    [(1e-4, E4M3, "vanished"), pytest.param(3e4, E4M3, "clipped", marks=CLIPPING), (1e-7, E5M2, "vanished")],
)
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_a_cast_to_float8_that_loses_what_a_scale_would_keep_is_observed(
    tmp_path: Path, size: float, dtype: torch.dtype, lost: str, outside: bool, source: torch.dtype
) -> None:
    """In a module and outside of modules; the experiment is the same cast with a scale."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)).mul(size).to(source)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype).float()

    trace = watched(tmp_path, lambda _: cast(x) if outside else Apply(cast)(x))
    (one,) = observed(trace, "float8-cast")
    assert one.values[lost] > 32
    assert one.values["relative_error"] > 0.5
    assert one.values["scaled_error"] < 0.1
    [found] = diagnose(trace)
    assert (found.id, found.confidence) == ("float8-range", "proven")
    assert found.source is not None
    assert found.source.startswith("test_routine_look.py:")


def into_cache(x: Tensor) -> Tensor:
    return torch.zeros(64, dtype=E4M3).copy_(x * 1e-4).float()


def test_a_copy_into_a_float8_cache_is_a_cast(tmp_path: Path) -> None:
    """The cache was made long before."""
    (one,) = seen(tmp_path, "float8-cast", into_cache, torch.randn(64))
    assert one.values["op"] == "aten.copy_.default"


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.to(E4M3),
        lambda x: (x * 0.02).to(E4M3),
        lambda x: x.mul(100).to(E4M3),
        lambda x: (x * 1e-4 * (448 / (x * 1e-4).abs().max())).to(E4M3),
        lambda x: (x * 1e4 * (300 / x.abs().amax(-1, keepdim=True) / 1e4)).to(E4M3),
        lambda x: (x * 1e-3).to(E5M2),
        lambda x: torch.cat([x.flatten() * 1e-6, torch.tensor([300.0])]).to(E4M3),
        lambda x: torch.zeros(4, 4).to(E4M3),
        lambda x: torch.zeros(4, 4, dtype=E4M3).float().to(E5M2),
        lambda x: x.new_full((4, 4), -30000.0).to(E5M2),
    ],
    ids=[
        "as it is",
        "weights",
        "range in use",
        "scaled",
        "scaled by row",
        "gradients",
        "outlier",
        "zeros",
        "between",
        "mask",
    ],
)
def test_casts_to_float8_that_only_round_or_that_no_scale_helps_are_not_observed(
    tmp_path: Path, work: Callable[[Tensor], Tensor]
) -> None:
    """Three bits are few, and that is what was asked for."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    assert seen(tmp_path, "float8-cast", work, x) == []


@pytest.mark.parametrize(
    "dtype", [E5M2, pytest.param(E4M3, marks=pytest.mark.skipif(not CLIPPING.args[0], reason="it is clipped"))]
)
def test_an_overflow_of_a_cast_to_float8_is_no_rounding(tmp_path: Path, dtype: torch.dtype) -> None:
    """float8_e5m2 has inf, float8_e4m3fn had NaN: the watch sees it, and the cast in a wider dtype proves it."""
    layer = Apply(lambda x: x.to(dtype).float())
    trace = watched(tmp_path, lambda _: layer(torch.full((8,), 1e5)).sum().item(), traced=True)
    [found, *_] = diagnose(trace)
    assert (found.id, found.confidence, found.dtype) == ("float8-range", "proven", str(dtype).removeprefix("torch."))


def test_a_router_in_half_precision_is_run_again_in_float32(tmp_path: Path) -> None:
    """Nearly equal scores swap; the count is that of a recomputation by hand."""
    torch.manual_seed(0)
    hidden, gate = torch.randn(1024, 64).bfloat16(), torch.randn(32, 64).bfloat16()

    def routed(x: Tensor) -> Tensor:
        odds, chosen = (x @ gate.T).float().softmax(-1).topk(4)
        return (odds[..., None] * torch.randn(32, 8)[chosen]).sum(1)

    (one,) = seen(tmp_path, "router", routed, hidden)
    exact = (hidden.float() @ gate.float().T).topk(4).indices.sort(-1).values
    rough = (hidden @ gate.T).float().softmax(-1).topk(4).indices.sort(-1).values
    assert one.values["flipped"] == int((exact != rough).any(-1).sum()) > 0
    assert (one.values["experts"], one.values["chosen"], one.values["tokens"]) == (32, 4, 1024)


def test_a_selection_that_nothing_is_looked_up_with_is_not_observed(tmp_path: Path) -> None:
    """Sampling keeps the largest scores, whichever they are."""

    def cut(x: Tensor) -> Tensor:
        scores = x @ x.T
        return scores.masked_fill(scores < scores.topk(4).values[..., -1:], -torch.inf)

    assert seen(tmp_path, "router", cut, torch.randn(256, 8).bfloat16()) == []


class Noting:
    """A check that notes in which call it was shown an operator."""

    def __init__(self) -> None:
        self.call = 0
        self.looked_at: list[int] = []

    def saw(self, seen: Seen) -> None:
        self.looked_at.append(self.call)


def test_calls_one_two_and_then_each_eight_times_later_are_looked_at(tmp_path: Path) -> None:
    """So that a long run costs what a short one does; generation is counted by itself."""
    session, noting = Session(TraceWriter(tmp_path)), Noting()
    look = RoutineLook([noting.saw], [], session)
    module, x = nn.Identity(), torch.ones(2)
    for phase, last in (("forward", 300), ("generate", 5)):
        with session.position.during(phase):
            for noting.call in range(1, last + 1):
                look.before_call(module)
                x.neg()
                look.after_call()
    session.writer.close()
    assert noting.looked_at == [1, 2, 16, 128, 1, 2]


def test_calls_of_some_steps_in_a_row_are_looked_at_where_calls_add_to_state(tmp_path: Path) -> None:
    """What is in a counter depends on all of them; only the check that follows it looks at those between, and again after steps that nobody has looked at."""
    session, noting, following = Session(TraceWriter(tmp_path)), Noting(), Noting()
    look = RoutineLook([noting.saw], [], session)
    look.accumulating = [following.saw]
    module, x = nn.Identity(), torch.ones(2)
    steps = [*range(1, 31), 90, 91]
    for session.position.step in steps:
        noting.call = following.call = session.position.step
        for _ in range(70 if session.position.step == 5 else 1):
            look.before_call(module)
            x.neg()
            look.after_call()
    session.writer.close()
    counted = Counter(following.looked_at)
    assert noting.looked_at == [1, 2, 5]
    assert counted.pop(5) == 64
    assert sorted(counted) == [3, 4, 6, 10, *range(18, 23), 90]


def test_a_program_with_a_mode_of_its_own_is_not_looked_at(tmp_path: Path) -> None:
    """Its mode would see the look's."""

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def work(_: object) -> None:
        with Counting():
            Apply(rms_norm)(torch.full((2, 4), 300.0).half())

    trace = watched(tmp_path, work)
    assert not observed(trace, "absorbed")


def test_a_module_that_raises_closes_the_look(tmp_path: Path) -> None:
    """No mode is left behind."""

    def fails(_: Tensor) -> Tensor:
        raise ValueError("no")

    watched(tmp_path, lambda _: Apply(fails)(torch.ones(2)))
    assert torch._C._len_torch_dispatch_stack() == 0


def test_compiled_code_is_compiled_under_the_look(tmp_path: Path) -> None:
    """With one graph, and no second one for the calls that are not looked at."""
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    net = torch.compile(nn.Linear(4, 4), backend=counting)
    watched(tmp_path, lambda _: [net(torch.ones(2, 4)) for _ in range(4)])
    assert len(graphs) == 1
