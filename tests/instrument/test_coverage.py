"""What ran is counted, and so is what was measured of it."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from watched import watched

from dtypedoctor.instrument.budget import Budget
from dtypedoctor.trace.events import Caught, Coverage, NotWatched, Op


def test_a_training_step_is_counted_and_measured_whole(tmp_path: Path) -> None:
    """Each module call, each gradient and the loss of a step is seen and measured."""

    def work(_: Any) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    found = watched(tmp_path, work).last(Coverage)
    assert found is not None
    assert (found.module_calls, found.module_calls_measured) == (3, 3)
    assert (found.gradients, found.gradients_measured) == (4, 4)
    assert (found.losses, found.losses_measured) == (1, 1)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("thinned", [{"every": 3}, {"every": 0}, {"budget": Budget(every=2)}])
def test_what_is_left_out_on_purpose_is_counted_among_what_ran(tmp_path: Path, thinned: Any) -> None:
    """Whatever is measured, the same calls and gradients ran; those that were not measured are named."""

    def work(_: Any) -> None:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = {}
    for name, options in (("whole", {}), ("thin", thinned)):
        (tmp_path / name).mkdir()
        found[name] = watched(tmp_path / name, work, **options)
    whole, thin = found["whole"].last(Coverage), found["thin"].last(Coverage)
    assert whole is not None
    assert thin is not None
    assert whole.module_calls_skipped == whole.gradients_skipped == 0
    if thinned != {"every": 0}:  # what one call holds is known from those that were looked at
        assert thin.module_calls + thin.module_calls_skipped == whole.module_calls
    assert thin.gradients + thin.gradients_skipped == whole.gradients
    assert thin.module_calls_measured < whole.module_calls
    assert thin.gradients_measured < whole.gradients
    assert [note for note in found["thin"].all(NotWatched) if "outermost calls" in note.what]
    assert not found["whole"].all(NotWatched)


def test_the_coverage_is_written_once(tmp_path: Path) -> None:
    """Stopping the instruments twice, as a worker does, counts nothing twice."""

    def work(instruments: Any) -> None:
        nn.Linear(2, 2)(torch.ones(1, 2))
        instruments.stop()

    assert len(watched(tmp_path, work).all(Coverage)) == 1


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("result", "caught"), [(None, 0), (ValueError("of the module's own"), 1)])
def test_a_module_that_returns_nothing_while_an_exception_is_handled_has_not_raised(
    tmp_path: Path, result: Any, caught: int
) -> None:
    """A fallback in an ``except`` block is a call like any other; one that raises there is recorded."""

    class Fallback(nn.Module):
        def forward(self) -> None:
            if result is not None:
                raise result

    def work(_: Any) -> None:
        fallback = nn.Sequential(Fallback())[0]
        try:
            raise KeyError("of the program's own")
        except KeyError:
            with contextlib.suppress(ValueError):
                fallback()

    assert len(watched(tmp_path, work).all(Caught)) == caught


class TwoOutputs(torch.autograd.Function):
    """Its backward is called with None for an output that nothing has used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
        return first * 2 if first is not None else None


class Halves(nn.Module):
    """Gives a module inside two inputs, of which it uses one, and returns two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.first, self.pair = nn.Linear(4, 8), nn.Identity(), Pair()

    def forward(self, x: torch.Tensor) -> Any:
        used, left = self.lin(x).chunk(2, -1)
        return self.pair(self.first(used)), left, left.unbind(0)[0]


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return TwoOutputs.apply(x)


def unused_outputs() -> nn.Module:
    """A model two of whose outputs have no gradient after a step; the hooks of both are called with None."""
    torch.manual_seed(0)
    model = Halves()
    (first, _), *_ = model(torch.ones(2, 4, requires_grad=True))
    first.sum().backward()
    return model


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("replays", [False, True])
def test_gradients_of_outputs_that_nothing_used_are_no_failures_of_the_instruments(
    tmp_path: Path, *, replays: bool
) -> None:
    """autograd calls a hook with None there; the other gradients are measured, and calls can be replayed."""

    def work(instruments: Any) -> None:
        if replays:
            instruments.in_place.begin(force=1)
        unused_outputs()

    trace = watched(tmp_path, work)
    assert not trace.all(NotWatched)
    measured = {(site.fqn, site.index) for site in trace.sites.values() if site.kind == "grad_output"}
    assert {fqn for fqn, _ in measured} == {"", "lin", "first", "pair"}
    assert {path for fqn, path in measured if fqn == "pair"} == {"0"}
    assert {op.phase for op in trace.all(Op)} == ({"forward", "backward"} if replays else set())
