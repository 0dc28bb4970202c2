"""The module watch on small real modules."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watched import watched

from dtypedoctor.analysis import analysis_of
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.trace.events import Flow, ParameterNote, Raised, Root, ScalerState
from dtypedoctor.trace.model import Trace


class Block(nn.Module):
    """Two linears with a functional product between them."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x) * self.gain)


class Net(nn.Module):
    """Blocks in a row; optionally each recomputed in the backward pass."""

    def __init__(self, *gains: float, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(gain) for gain in gains)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def outputs(trace: Trace, phase: str = "forward") -> dict[str, float]:
    """The last magnitude of each module's output (or gradient) in a phase."""
    return {
        site.fqn: s.absmax
        for s in trace.samples
        if (site := trace.sites[s.site]).phase == phase and site.kind != "param"
    }


def test_every_module_is_measured_in_forward_and_backward(tmp_path: Path) -> None:
    """Each module's output and the gradient of it are recorded with the values that torch gives."""
    net, x = Net(1.0, 1.0), torch.randn(4, 8)
    trace = watched(tmp_path, lambda _: net(x).square().sum().backward())
    names = {name for name, module in net.named_modules() if not isinstance(module, nn.ModuleList)}
    assert set(outputs(trace)) - {"0"} == names  # "0" is the loss
    assert {s.fqn for s in trace.sites.values() if s.kind == "grad_output"} == names
    assert outputs(trace)["blocks.0.wide"] == pytest.approx(net.blocks[0].wide(x).abs().max().item(), rel=1e-6)
    assert {f.fqn for f in trace.all(Flow)} == names


def test_the_first_inf_is_recorded_at_the_module_that_returned_it_with_its_bad_input(tmp_path: Path) -> None:
    """A product that overflows between two modules shows as a module whose input was already not finite."""
    net = Net(1.0, 1e6).half()
    trace = watched(tmp_path, lambda _: net(torch.randn(4, 8).half()))
    found = analysis_of(trace).first_nonfinite
    assert found is not None
    assert found[1].fqn == "blocks.1.narrow"
    bad_inputs = [
        trace.sites[s.site].fqn for s in trace.samples if trace.sites[s.site].kind == "input" and not s.finite
    ]
    assert bad_inputs[0] == "blocks.1.narrow"


def test_counts_of_nan_and_inf_are_exact(tmp_path: Path) -> None:
    """Three inf and two NaN among finite values are counted as that, and the magnitude is that of the others."""

    class Spoil(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.inf])
            x[1, :2] = torch.nan
            return x

    trace = watched(tmp_path, lambda _: Spoil()(torch.full((4, 8), 2.5)))
    sample = trace.samples[0]
    assert (sample.absmax, sample.num_nan, sample.num_inf) == (2.5, 2, 3)


def test_a_module_called_during_the_backward_pass_is_a_recomputation(tmp_path: Path) -> None:
    """Checkpointed blocks appear in phase recompute under the call that is being differentiated."""
    net, x = Net(1.0, 1.0, recompute=True), torch.randn(4, 8, requires_grad=True)
    trace = watched(tmp_path, lambda _: net(x).sum().backward())
    assert set(outputs(trace, "recompute")) >= {"blocks.0.wide", "blocks.1.wide"}
    assert {s.call for s in trace.samples} == {1}


def test_steps_are_counted_from_one_and_a_skipped_scaler_step_counts(tmp_path: Path) -> None:
    """Three steps, the first skipped for an inf gradient: samples carry 1, 2, 3 and the scaler says which was skipped."""
    net = Net(1.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def train(_: Instruments) -> None:
        for number in range(3):
            optimizer.zero_grad()
            loss = net(torch.randn(4, 8)).sum() * (float("inf") if number == 0 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    trace = watched(tmp_path, train)
    assert sorted({s.step for s in trace.samples}) == [1, 2, 3]
    assert [(s.step, s.skipped) for s in trace.all(ScalerState)] == [(1, True), (2, False), (3, False)]


def test_a_step_that_a_fused_optimizer_does_not_take_is_a_skipped_one(tmp_path: Path) -> None:
    """A scaler calls a fused optimizer for every step, and its kernel leaves the parameters as they are where a gradient is inf."""
    net = Net(1.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def train(_: Instruments) -> None:
        for number in range(3):
            optimizer.zero_grad()
            loss = net(torch.randn(4, 8)).sum() * (float("inf") if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    trace = watched(tmp_path, train)
    assert [(s.step, s.skipped) for s in trace.all(ScalerState)] == [(1, False), (2, True), (3, False)]


def test_an_exception_names_the_modules_that_were_open(tmp_path: Path) -> None:
    """The stack of module calls at the raise is kept, although hooks unwind before the exception reaches the top."""
    net = Net(1.0).bfloat16()
    trace = watched(tmp_path, lambda _: net(torch.randn(2, 8)))
    raised = trace.last(Raised)
    assert raised is not None
    assert raised.modules == ["", "blocks.0", "blocks.0.wide"]
    assert "dtype" in raised.message
    assert raised.phase == "forward"


def test_parameters_and_buffers_are_noted_with_their_owner(tmp_path: Path) -> None:
    """dtype, shape, owner and whether it trains are known for every parameter and buffer."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
    trace = watched(tmp_path, lambda _: net(torch.randn(3, 4)))
    notes = {p.name: p for p in trace.all(ParameterNote)}
    assert notes["1.running_mean"].buffer
    assert notes["1.weight"].owner == "BatchNorm1d"
    assert notes["0.weight"].shape == [4, 4]
    assert not notes["0.weight"].requires_grad
    (root,) = trace.all(Root)
    assert root.dtypes == {"float32": 28}


def test_a_tensor_changed_in_place_is_measured_again(tmp_path: Path) -> None:
    """A container that returns its child's tensor after changing it in place gets the new magnitude."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).mul_(3.0)

    trace = watched(tmp_path, lambda _: Scale()(torch.ones(2, 2)))
    assert outputs(trace) == {"inner": 1.0, "": 3.0}


def test_many_shapes_of_one_place_are_described_a_bounded_number_of_times(tmp_path: Path) -> None:
    """A model that sees a new length every step does not fill the trace with descriptions."""
    net = nn.Linear(4, 4)
    trace = watched(tmp_path, lambda _: [net(torch.randn(n, 4)) for n in range(1, 40)])
    described = [s for s in trace.sites.values() if s.kind == "output"]
    assert len(described) == 5
    assert [-1, -1] in [s.shape for s in described]
    assert len(trace.samples) == 39


def test_parameters_and_gradients_belong_to_the_model_that_holds_them(tmp_path: Path) -> None:
    """Two models with layers of the same name, each with an optimizer of its own."""

    def work(_: Instruments) -> None:
        models = [nn.Sequential(nn.Linear(2, size)) for size in (2, 3)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        sum(model(torch.ones(1, 2)).sum() for model in models).backward()
        for optimizer in optimizers:
            optimizer.step()

    sites = watched(tmp_path, work).sites.values()
    for kind in ("grad", "param"):
        held = {(s.root, s.fqn, s.shape[0]) for s in sites if s.kind == kind}
        assert held == {(0, "0.weight", 2), (0, "0.bias", 2), (1, "0.weight", 3), (1, "0.bias", 3)}
