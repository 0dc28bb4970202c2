"""Optimizers that a program has written itself: watching them changes nothing, and what is not checked is said."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from watched import watched

from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.reader import read_trace
from dtypedoctor.trace.records.silent import RoundedUse, Updates
from dtypedoctor.trace.writer import TraceWriter


class Plain(Optimizer):
    """Subtracts the gradient."""

    def __init__(self, params: Any, lr: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr})
        self.taken: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.taken.append(1)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


class Counting(Plain):
    def __init__(self, params: Any) -> None:
        Optimizer.__init__(self, params, {"lr": 1e-2, "taken": [], "nested": {"all": []}})
        self.taken = self.param_groups[0]["taken"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.defaults["nested"]["all"].append(len(self.taken))
        super().step()


def subtract(p: torch.Tensor, lr: float) -> None:
    """The update of :class:`Calling`."""
    p.add_(p.grad, alpha=-lr)  # type: ignore[arg-type]


class Calling(Plain):
    """Holds the function that makes the update, as lion-pytorch does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.update: Any = subtract

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.update(p, self.param_groups[0]["lr"])


class Remembering(Calling):
    """The function keeps what it has done."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        done: list[int] = []
        self.update = lambda p, lr: (done.append(1), subtract(p, lr))


class Masters(Optimizer):
    """Holds float32 copies of the weights beside its state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.masters = [p.detach().float() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, master in zip(self.param_groups[0]["params"], self.masters, strict=True):
            master.add_(p.grad.float(), alpha=-self.param_groups[0]["lr"])
            p.copy_(master)


class StateMasters(Optimizer):
    """Holds them in its state."""

    def __init__(self, params: Any, lr: float = 1e-6) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            master = self.state[p].setdefault("master", p.detach().float())
            master.add_(p.grad.float(), alpha=-self.param_groups[0]["lr"])
            p.copy_(master)


class Kahan(Plain):
    """Keeps what rounding takes of an update and adds it to the next one; ``only_half`` as optimizers do that need it for half precision only."""

    def __init__(self, params: Any, lr: float = 1e-6, momentum: float = 0.0, only_half: bool = False) -> None:
        Optimizer.__init__(self, params, {"lr": lr, "momentum": momentum, "only_half": only_half})
        self.taken: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state.update(kept=torch.zeros_like(p), mean=torch.zeros_like(p))
            state["mean"].mul_(group["momentum"]).add_(p.grad)
            if group["only_half"] and p.dtype is torch.float32:
                p.add_(state["mean"], alpha=-group["lr"])
                continue
            state["kept"].add_(state["mean"], alpha=-group["lr"])
            before = p.detach().clone()
            p.add_(state["kept"])
            state["kept"].add_(before.sub_(p.detach()))


class AtRandom(Plain):
    """Rounds at random, to both sides in proportion, in place of to the nearest number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            exact = p.float().add_(p.grad.float(), alpha=-self.param_groups[0]["lr"])
            if p.dtype is torch.float32:
                p.copy_(exact)
                continue
            bits = exact.view(torch.int32) + torch.randint_like(exact, 1 << 16, dtype=torch.int32)
            p.copy_((bits & -65536).view(torch.float32))


class Closed(Plain):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        super().step()


class Wrapping(Optimizer):
    """Lets another one step."""

    def __init__(self, params: Any) -> None:
        self.inner = SGD(params, lr=0.1)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def trained(
    make: Callable[[Any], Optimizer], directory: Path | None, size: int = 16, resumed: bool = False
) -> tuple[Any, Trace | None, Optimizer]:
    """The weights after six steps, with what was recorded of them in ``directory``; ``resumed`` with the state of two steps before."""
    torch.manual_seed(0)
    model = nn.Linear(size, size).bfloat16()
    optimizer = make(model.parameters())
    for _ in range(2 if resumed else 0):
        model(torch.randn(4, size).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    writer = TraceWriter(directory) if directory is not None else None
    instruments = Instruments(writer) if writer is not None else None
    if instruments is not None:
        instruments.start()
    for _ in range(6):
        model(torch.randn(4, size).bfloat16()).float().square().mean().backward()
        closure: Any = [lambda: None] if isinstance(optimizer, Closed) else []
        optimizer.step(*closure)
        optimizer.zero_grad()
    if instruments is None or writer is None or directory is None:
        return model.weight.detach().clone(), None, optimizer
    instruments.stop()
    writer.close()
    return model.weight.detach().clone(), read_trace(directory), optimizer


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    "make",
    [Plain, Counting, Calling, Remembering, Masters, StateMasters, Closed, Wrapping],
    ids=lambda make: make.__name__,
)
def test_what_a_program_trains_is_bitwise_what_it_is_unwatched(make: Any, tmp_path: Path) -> None:
    """The check takes the step a second time, on copies: nothing of the optimizer's own is written to."""
    alone, _, one = trained(make, None)
    watched, _, other = trained(make, tmp_path)
    assert torch.equal(alone, watched)
    assert vars(one).get("taken") == vars(other).get("taken")
    assert one.defaults == other.defaults
    for group, same in zip(one.param_groups, other.param_groups, strict=True):
        assert {**group, "params": 0} == {**same, "params": 0}


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("make", [Masters, StateMasters], ids=lambda make: make.__name__)
def test_weights_that_are_copies_of_float32_ones_do_not_stall(make: Any, tmp_path: Path) -> None:
    """Wherever an optimizer holds these, and from its first step on."""
    assert not lost(trained(make, tmp_path)[1])


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    ("make", "size"),
    [(Closed, 16), (Remembering, 16), (Calling, 16), (Plain, 300)],
    ids=["closure", "remembering", "calling", "large"],
)
def test_an_optimizer_is_checked_whatever_it_holds(make: Any, size: int, tmp_path: Path) -> None:
    """Its own operators are looked at, and no copy of it has to make a step."""
    assert lost(trained(make, tmp_path, size)[1])


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_updates_are_checked_however_torch_makes_the_step(how: str, tmp_path: Path) -> None:
    """One kernel for all parameters, or one for each: the float32 copy makes the same."""
    _, trace, _ = trained(lambda params: torch.optim.AdamW(params, lr=1e-9, **{how: True}), tmp_path)
    assert trace is not None
    assert trace.observed(Updates)
    assert not trace.all(NotWatched)


def lost(trace: Trace | None) -> dict[str, int]:
    assert trace is not None
    seen = trace.observed(Updates)
    return {name: one.lost for name, one in seen[-1].what.parameters.items()} if seen else {}


class KahanOfOneLine(Kahan):
    """The same in one line, so that one operator at one line is met several times in a step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            kept = self.state[p].setdefault("kept", torch.zeros_like(p))
            # fmt: off
            kept.add_(p.grad, alpha=-self.param_groups[0]["lr"]); before = p.clone(); p.add_(kept); kept.add_(before.sub_(p))
            # fmt: on


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("make", [Kahan, KahanOfOneLine])
def test_what_keeps_the_rounding_of_weights_is_no_sum_that_drifts(make: type[Optimizer], tmp_path: Path) -> None:
    """In float64 it is 0 after each step, and in bfloat16 it is what the weights have lost: neither has lost anything by itself."""

    def program(_: object) -> None:
        torch.manual_seed(0)
        model = nn.Linear(16, 4).bfloat16()
        nn.init.ones_(model.weight)
        optimizer = make(model.parameters(), lr=4e-3)
        x = torch.randn(64, 16).bfloat16()
        for _ in range(40):
            optimizer.zero_grad()
            (model(x).float() - x[:, :4].float()).square().mean().backward()
            optimizer.step()

    assert not watched(tmp_path, program).observed(RoundedUse)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("lr", [1e-4, 1e-2])
def test_weights_that_are_rounded_at_random_do_not_stall(lr: float, tmp_path: Path) -> None:
    """Most weights stay in each step, and the few that move go as far as all of them were to go."""
    assert not lost(trained(lambda params: AtRandom(params, lr=lr), tmp_path, size=64)[1])
