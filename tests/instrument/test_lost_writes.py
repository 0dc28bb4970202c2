"""Updates in place outside of optimizers: those that half precision rounds away are told of, and no others."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from observed import observed
from torch import Tensor, nn
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.diagnosis.rule import Finding
from dtypedoctor.instrument.budget import Budget
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.trace.records.silent import LostWrites


def findings(directory: Path, work: Callable[[object], None]) -> list[Finding]:
    """What is found of updates that are lost."""
    return [finding for finding in diagnose(watched(directory, work)) if finding.id == "update-stall"]


def net(dtype: torch.dtype) -> nn.Module:
    """Weights between 0.5 and 1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.0)
    return model.to(dtype)


def gradients(model: nn.Module, dtype: torch.dtype) -> None:
    """Leaves gradients of about one."""
    model.zero_grad()
    model(torch.ones(2, 16, dtype=dtype)).float().mean().backward()


def by_hand(dtype: torch.dtype, lr: float) -> Callable[[object], None]:
    """SGD without an optimizer, as many first examples have it."""

    def work(_: object) -> None:
        model = net(dtype)
        for _ in range(5):
            gradients(model, dtype)
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-lr)

    return work


def average(dtype: torch.dtype, decay: float) -> Callable[[object], None]:
    """A moving average beside a float32 training."""

    def work(_: object) -> None:
        model = net(torch.float32)
        kept = copy.deepcopy(model).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(5):
            gradients(model, torch.float32)
            optimizer.step()
            with torch.no_grad():
                for own, theirs in zip(kept.parameters(), model.parameters(), strict=True):
                    own.mul_(decay).add_(theirs, alpha=1 - decay)

    return work


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("work", "line"),
    [
        (by_hand(torch.bfloat16, 1e-4), "parameter.data.add_("),
        (by_hand(torch.float16, 1e-6), "parameter.data.add_("),
        (average(torch.bfloat16, 0.9999), "own.mul_("),
    ],
    ids=["bfloat16 by hand", "float16 by hand", "bfloat16 average"],
)
def test_updates_in_place_that_are_rounded_away_are_found_at_their_line(
    tmp_path: Path, work: Callable[[object], None], line: str
) -> None:
    """With the float32 copies as the evidence, once for the line."""
    (found,) = findings(tmp_path, work)
    number = int((found.source or ":0").rpartition(":")[2])
    assert line in Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1]
    assert found.confidence.value == "likely"  # a script may keep what is lost beside it
    assert found.proven_by is None
    assert "4 tensors in place" in found.summary


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    "work",
    [
        by_hand(torch.float32, 1e-4),
        by_hand(torch.bfloat16, 0.5),
        by_hand(torch.bfloat16, 0.0),
        average(torch.float32, 0.9999),
        average(torch.bfloat16, 0.5),
    ],
    ids=["float32", "large steps", "no steps", "float32 average", "quick average"],
)
def test_updates_that_arrive_are_none(tmp_path: Path, work: Callable[[object], None]) -> None:
    """Nor are those that would not move a float32 copy either."""
    assert findings(tmp_path, work) == []


def compensated(form: str, steps: int, *, any_sign: bool = False) -> Callable[[object], None]:
    """Steps far below the spacing of bfloat16, with what each loses kept beside the weights; gradients as they are or of any sign."""

    def work(_: object) -> None:
        model = net(torch.bfloat16)
        kept = [torch.zeros_like(p) for p in model.parameters()]
        for _ in range(steps):
            gradients(model, torch.bfloat16)
            with torch.no_grad():
                for p, c in zip(model.parameters(), kept, strict=True):
                    update = -1e-4 * (torch.randn_like(p) if any_sign else p.grad)  # type: ignore[operator]
                    old = p.clone()
                    if form == "buffer":  # as torchao's and optimi's optimizers do
                        c.add_(update)
                        p.add_(c)
                        c.add_(old.sub_(p))
                    else:
                        y = update - c
                        p.add_(y)
                        c.copy_((p - old) - y)

    return work


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("steps", [3, 4, 9])
@pytest.mark.parametrize("signs", ["equal gradients", "gradients of any sign"])
@pytest.mark.parametrize("form", ["buffer", "textbook"])
def test_what_is_kept_and_added_to_the_next_update_is_not_lost(
    form: str, signs: str, steps: int, tmp_path: Path
) -> None:
    """Kahan summation in its usual forms, also where so few steps have been made that no weight has moved yet."""
    assert findings(tmp_path, compensated(form, steps, any_sign="any" in signs)) == []


def test_memory_that_is_used_again_copies_of_float32_weights_and_optimizers_are_none(tmp_path: Path) -> None:
    """An epsilon that guards other values at each step, the copy that master weights leave, a step inside of an optimizer."""

    def work(_: object) -> None:
        model, master = net(torch.bfloat16), [p.detach().float() for p in net(torch.bfloat16).parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(5):
            gradients(model, torch.bfloat16)
            guard: Tensor = torch.rand(16, 16, dtype=torch.bfloat16) + 1.0
            guard.add_(1e-6)
            del guard
            optimizer.step()
            with torch.no_grad():
                for own, theirs in zip(model.parameters(), master, strict=True):
                    own.copy_(theirs.sub_(1e-5))

    assert observed(watched(tmp_path, work), "lost-writes") == []


def test_a_line_whose_tensors_move_in_the_end_is_withdrawn(tmp_path: Path) -> None:
    """A warm-up of the learning rate by hand begins below what bfloat16 can tell apart."""

    def work(_: object) -> None:
        weight = torch.full((64,), 3.0, dtype=torch.bfloat16)
        for step in range(70):
            weight.sub_(torch.full_like(weight, 5e-4 * step))

    trace = watched(tmp_path, work)
    told = [seen.values["tensors"] for seen in observed(trace, "lost-writes")]
    assert told[0] == 1
    assert told[-1] == 0
    assert [finding for finding in diagnose(trace) if finding.id == "update-stall"] == []


@pytest.mark.release
def test_what_has_stood_still_is_told_of_where_later_calls_are_not_all_looked_at(tmp_path: Path) -> None:
    """Some elements have moved until the next look, and what is seen then begins anew: nothing of that withdraws what was seen before."""
    now = [0.0]
    budget = Budget(share=0.3, clock=lambda: now[0], busy=lambda: now[0])

    def work(instruments: Instruments) -> None:
        torch.manual_seed(0)
        model = net(torch.bfloat16)
        kept = copy.deepcopy(model)
        for _ in range(150):
            gradients(model, torch.bfloat16)
            now[0] += 0.2 if instruments.position.looks else 0.05
            for own, theirs in zip(kept.parameters(), model.parameters(), strict=True):
                theirs.data.copy_(own.data.float() + 0.4 + 0.2 * torch.randn(own.shape))
                own.data.lerp_(theirs.data, 0.002)

    trace = watched(tmp_path, work, budget=budget)
    (finding,) = [one for one in diagnose(trace) if one.id == "update-stall"]
    assert "in place" in finding.summary


def assigned(decay: float, *, weights_first: bool = False) -> Callable[[object], None]:
    """An average that is computed anew and assigned at each step."""

    def work(_: object) -> None:
        model = net(torch.float32)
        kept = copy.deepcopy(model).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(8):
            gradients(model, torch.float32)
            optimizer.step()
            for own, theirs in zip(kept.parameters(), model.parameters(), strict=True):
                old, new = own.data, theirs.data.to(own.dtype)
                own.data = (1 - decay) * new + old * decay if weights_first else old * decay + (1 - decay) * new

    return work


def soft_update(
    tau: float, *, weights_first: bool = False, wide: bool = False, target: torch.dtype = torch.bfloat16
) -> Callable[[object], None]:
    """A target network as in reinforcement learning: computed anew and copied into its own memory; ``wide`` beside float32 weights."""

    def work(_: object) -> None:
        model = net(torch.float32 if wide else torch.bfloat16)
        kept = copy.deepcopy(model).to(target)
        for _ in range(8):
            for own, theirs in zip(kept.parameters(), model.parameters(), strict=True):
                theirs.data.mul_(0.875)
                kept_part, new_part = own.data * (1 - tau), theirs.data * tau
                own.data.copy_(new_part + kept_part if weights_first else kept_part + new_part)

    return work


def through_half(decay: float, *, half: bool = True, first: bool = True) -> Callable[[object], None]:
    """A mean in float32 memory that is computed in float32 and goes through half precision on its way there: each time, or only the first."""

    def work(_: object) -> None:
        torch.manual_seed(0)
        mean = torch.ones(256)
        for number in range(12):
            now = decay * mean + (1 - decay) * (1 + 0.1 * torch.rand(256))
            mean.copy_(now.to(torch.bfloat16) if half or (first and not number) else now)

    return work


def equal_weights(_: object) -> None:
    """The target is what the weights are: in float32 the average of the two is off by a rounding."""
    model = net(torch.bfloat16)
    kept = copy.deepcopy(model)
    for _ in range(8):
        for own, theirs in zip(kept.parameters(), model.parameters(), strict=True):
            own.data.copy_(own.data * 0.995 + theirs.data * 0.005)


def masters(_: object) -> None:
    """Float32 weights that are copied into those of half precision."""
    model = net(torch.bfloat16)
    wide = [parameter.detach().float() for parameter in model.parameters()]
    for _ in range(8):
        for own, master in zip(model.parameters(), wide, strict=True):
            master.sub_(1e-6)
            own.data.copy_(master * 1.0)


def begun_with_a_copy(decay: float) -> Callable[[object], None]:
    """The first update takes the weights as they are, as DiT's training does."""

    def work(_: object) -> None:
        model = net(torch.float32)
        kept = copy.deepcopy(model).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(9):
            gradients(model, torch.float32)
            optimizer.step()
            by = decay if step else 0.0
            with torch.no_grad():
                for own, theirs in zip(kept.parameters(), model.parameters(), strict=True):
                    own.mul_(by).add_(theirs.data, alpha=1 - by)

    return work


def beside_zeros(_: object) -> None:
    """Small weights that begin at zero move, the others do not."""
    weights = [torch.full((4096,), 0.5), *(torch.full((8,), 0.01) for _ in range(3))]
    kept = [torch.full((4096,), 0.75).bfloat16(), *(torch.zeros(8).bfloat16() for _ in range(3))]
    for _ in range(9):
        for own, theirs in zip(kept, weights, strict=True):
            own.mul_(0.9999).add_(theirs, alpha=1e-4)


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    ("work", "line"),
    [
        (beside_zeros, "own.mul_(0.9999)"),
        (assigned(0.9999), "own.data = (1 - decay)"),
        (assigned(0.9999, weights_first=True), "own.data = (1 - decay)"),
        (begun_with_a_copy(0.9999), "own.mul_(by)"),
        (soft_update(1e-3), "own.data.copy_("),
        (soft_update(1e-3, weights_first=True), "own.data.copy_("),
        (soft_update(1e-3, wide=True), "own.data.copy_("),
        (soft_update(1e-3, wide=True, weights_first=True), "own.data.copy_("),
        (through_half(0.999), "mean.copy_(now.to("),
    ],
    ids=[
        "beside zeros",
        "assigned",
        "assigned, weights first",
        "begun with a copy",
        "copied",
        "copied, weights first",
        "copied from float32",
        "copied from float32, weights first",
        "in float32 memory, through half precision",
    ],
)
def test_averages_that_move_once_or_are_assigned_anew_are_found(
    tmp_path: Path, work: Callable[[object], None], line: str
) -> None:
    """They stand still from then on."""
    (found,) = findings(tmp_path, work)
    number = int((found.source or ":0").rpartition(":")[2])
    assert line in Path(__file__).read_text(encoding="utf-8").splitlines()[number - 1]
    assert "tensor" in found.summary


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    "work",
    [
        assigned(0.5),
        assigned(0.5, weights_first=True),
        begun_with_a_copy(0.5),
        soft_update(0.5),
        soft_update(0.5, wide=True, weights_first=True),
        soft_update(1e-3, wide=True, target=torch.float32),
        equal_weights,
        masters,
        through_half(0.5),
        through_half(0.999, half=False),
        through_half(0.999, half=False, first=False),
    ],
    ids=[
        "assigned",
        "first",
        "copy",
        "copied",
        "wide",
        "float32",
        "equal",
        "masters",
        "through half precision",
        "half once",
        "never half",
    ],
)
def test_moving_averages_that_move_are_no_lost_writes(tmp_path: Path, work: Callable[[object], None]) -> None:
    """They move in every step, or have nowhere to go."""
    assert findings(tmp_path, work) == []


def merged(size: float, dtype: torch.dtype = torch.bfloat16, *, into_copy: bool = False) -> Callable[[object], None]:
    """An adapter of low rank is added to the weights of a model that has been called."""

    def work(_: object) -> None:
        model = net(dtype)
        model(torch.ones(2, 16, dtype=dtype))
        for layer in model:
            weight = layer.weight.data.clone() if into_copy else layer.weight.data
            weight += (size * torch.randn(16, 2) @ torch.randn(2, 16)).to(dtype)

    return work


def test_an_adapter_whose_merge_is_rounded_away_is_found(tmp_path: Path) -> None:
    """One write is enough where it is all that a line does to parameters."""
    (finding,) = findings(tmp_path, merged(1e-5))
    assert finding.source is not None
    assert finding.source.startswith("test_lost_writes.py:")
    assert "of 2 bfloat16 tensors" in finding.evidence[0]
    assert "509 of these did not move" in finding.evidence[2]


def test_what_stands_still_is_told_of_from_the_call_on_in_which_it_does(tmp_path: Path) -> None:
    """That it does not move is known three rounds later."""

    class Anneals(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("temperature", torch.tensor(2.0, dtype=torch.bfloat16))

        def forward(self) -> Tensor:
            return self.temperature.mul_(0.999)

    def work(_: object) -> None:
        module = Anneals()
        for _ in range(20):
            module()

    trace = watched(tmp_path, work)
    assert {seen.call for seen in trace.observed(LostWrites)} == {1}
