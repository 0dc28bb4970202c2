"""The recorder that never waits, with its batches measured on a CPU: the same code as on a GPU but for the kernel."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor.instrument import batches, recorders
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.model import Trace


class Chain(nn.Module):
    """Linears in a row with a product between them, wrapped so that containers return what their last child returned."""

    def __init__(self, depth: int, gain: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(depth))
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.gain
        return x


def train(net: nn.Module, steps: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


def story(trace: Trace) -> list[tuple[object, ...]]:
    """What was measured, in the order of events, without sequence numbers."""
    return [
        (s.step, s.call, site.phase, site.kind, site.fqn, site.index, s.absmax)
        for s in trace.samples
        if (site := trace.sites[s.site])
    ]


@pytest.fixture
def behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are measured in batches, as a GPU's."""
    monkeypatch.setattr(recorders, "BEHIND", frozenset({"cuda", "cpu"}))


def nets(depth: int, gain: float = 1.0) -> tuple[Chain, Chain]:
    """Two equal networks."""
    torch.manual_seed(0)
    one, two = Chain(depth, gain), Chain(depth, gain)
    two.load_state_dict(one.state_dict())
    return one, two


def test_batched_and_immediate_recording_tell_the_same_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample that is written at once on a CPU is written by the batching recorder too, in the same order."""
    one, two = nets(6)
    (tmp_path / "now").mkdir()
    (tmp_path / "later").mkdir()
    expected = watched(tmp_path / "now", lambda _: train(one))
    monkeypatch.setattr(recorders, "BEHIND", frozenset({"cpu"}))
    found = watched(tmp_path / "later", lambda _: train(two))
    assert story(found) == story(expected)
    assert len(found.samples) > 250
    assert not found.all(NotWatched)


def test_what_is_not_finite_first_is_told_first_by_both_recorders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that is called twice is known by its first call, though a batch measures the newest tensors first."""
    shared, between = nn.Linear(4, 4), nn.Linear(4, 4)
    net = nn.Sequential(shared, between, shared).half()
    found: list[list[tuple[int, str]]] = []

    def work(instruments: Instruments) -> None:
        net(torch.ones(2, 4).half())  # new sites are measured at once
        net(torch.full((2, 4), torch.inf).half())
        instruments.modules.recorders.flush()
        found.append(
            sorted((one.n, one.fqn) for one in instruments.modules.recorders.news.take() if one.kind == "output")
        )

    for name, behind in (("now", frozenset[str]()), ("later", frozenset({"cpu"}))):
        monkeypatch.setattr(recorders, "BEHIND", behind)
        (tmp_path / name).mkdir()
        watched(tmp_path / name, work)
    now, later = ([fqn for _, fqn in one] for one in found)
    assert now == later == ["0", "1", ""]


@pytest.mark.usefixtures("behind")
def test_a_tensor_changed_in_place_before_its_batch_is_left_out_once_and_then_measured_at_once(tmp_path: Path) -> None:
    """No sample ever has the magnitude of a later version of its tensor."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Identity()
            self.inner = nn.Linear(2, 2, bias=False)
            nn.init.eye_(self.inner.weight)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                return self.inner(self.first(x)).mul_(3.0)

    net = Scale()
    trace = watched(tmp_path, lambda _: [net(torch.ones(2, 2)) for _ in range(4)])
    inner = [s.absmax for s in trace.samples if trace.sites[s.site].fqn == "inner"]
    outer = [s.absmax for s in trace.samples if trace.sites[s.site].fqn == "" and trace.sites[s.site].kind == "output"]
    assert set(inner) == {1.0}
    assert set(outer) == {3.0}
    assert len(outer) == 4


@pytest.mark.usefixtures("behind")
@pytest.mark.parametrize("kept", [batches.KEPT_BYTES, 66], ids=["launched at the end", "launched as it is full"])
def test_a_tensor_freed_before_its_batch_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """FSDP frees parameters by resizing their storage: nothing is read at an address that is not the tensor's any more, and that is said."""
    monkeypatch.setattr(batches, "KEPT_BYTES", kept)

    class Frees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            found = self.first(x * 2)
            result = found.sum()
            found.untyped_storage().resize_(0)
            return result

    net = Frees()
    with torch.no_grad():
        trace = watched(tmp_path, lambda _: [net(torch.ones(16)) for _ in range(4)])
    first = [s.absmax for s in trace.samples if trace.sites[s.site].fqn == "first"]
    assert set(first) == {2.0}
    assert len(first) == 3
    assert any("freed" in note.why for note in trace.all(NotWatched))


@pytest.mark.usefixtures("behind")
def test_layouts_and_dtypes_are_all_measured(tmp_path: Path) -> None:
    """Transposed, sliced, expanded, empty, float64 and float8 outputs have the same magnitudes as by torch."""
    base = torch.randn(6, 10)
    cases = {
        "transposed": base.t(),
        "sliced": base[:, 1:4],
        "expanded": base[:1].expand(4, 10),
        "empty": base[:0],
        "double": base.double() * 1e300,
        "eighth": base.to(torch.float8_e4m3fn),
        "odd": base.flatten()[1:].bfloat16(),
        "scalar": base[0, 0].half(),
    }

    class Give(nn.Module):
        def forward(self) -> dict[str, Tensor]:
            return cases

    trace = watched(tmp_path, lambda _: Give()())
    found = {trace.sites[s.site].index: s for s in trace.samples}
    assert found.keys() == cases.keys()
    for name, tensor in cases.items():
        wanted = tensor.float().abs().max().item() if tensor.numel() else 0.0
        assert found[name].finite
        assert found[name].absmax == pytest.approx(min(wanted, torch.finfo(torch.float32).max), rel=1e-6), name


class Attention(nn.Module):
    """Called with keyword arguments, a tuple of tensors and whole numbers among them; returns a tensor and None."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(
        self, *, hidden: Tensor, mask: Tensor | None, turns: tuple[Tensor, Tensor], ids: Tensor
    ) -> tuple[Tensor, None]:
        hidden = hidden if mask is None else hidden + mask
        return self.inner(hidden * turns[0] + turns[1]) + ids[:, None], None


class Block(nn.Module):
    """Calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        turns = (torch.ones(4), torch.zeros(4))
        return x + self.attention(hidden=x, mask=mask, turns=turns, ids=torch.arange(2))[0]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("at", [frozenset[str](), frozenset({"cpu"})], ids=["immediate", "batched"])
def test_calls_with_keyword_arguments_are_recorded_alike_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: frozenset[str]
) -> None:
    """A call like the one before takes a shorter way: with the same samples, and the same inputs where the result is not finite."""
    monkeypatch.setattr(recorders, "BEHIND", at)
    net = Block()
    plain, spoilt = torch.ones(2, 4), torch.full((2, 4), torch.inf)
    masks = [None, None, torch.ones(2, 4), torch.ones(2, 4), None]
    trace = watched(tmp_path, lambda _: [net(x, mask).sum().backward() for x in (plain, spoilt) for mask in masks])
    told: dict[int, list[tuple[object, ...]]] = {}
    for step_, call, phase, kind, fqn, index, _ in story(trace):
        told.setdefault(int(str(call)), []).append((step_, phase, kind, fqn, index))
    assert told[1] == told[2] == told[5]
    assert told[3] == told[4]
    assert told[6] == told[7] == told[10]
    inputs = [(fqn, index) for _, _, kind, fqn, index in told[7] if kind == "input"]
    assert ("attention", "hidden") in inputs
    assert ("attention", "turns.1") in inputs
    outputs = [(fqn, index) for _, _, kind, fqn, index in told[2] if kind == "output"]
    assert ("attention", "0") in outputs
    assert len([one for one in told[2] if one[2] == "grad_output"]) == 3
