"""What collectives add to a watched step behind a stream, in launches and flushes. Never in time."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from dtypedoctor.instrument import batches, recorders
from dtypedoctor.instrument.batches import Asked, Batches, NormRows
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.instrument.recorders import Recorders
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.reader import read_trace
from dtypedoctor.trace.writer import TraceWriter

BLOCKS, STEPS = 6, 5
"""The checks for silent failures look closer at the steps 1 to 4: the fifth is an ordinary one."""


class Counted(NormRows):
    """Measures as on a device without Triton, and remembers the tensors of each launch."""

    limit = 64

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.launched: list[list[float]] = []

    def launch(self, batch: Sequence[Asked]) -> int:
        """Remembers the first element of each tensor, none of whose memory may be gone: a kernel that reads there ends the program."""
        assert all(tensor.untyped_storage().nbytes() for tensor, _ in batch)
        self.launched.append([float(tensor.detach().flatten()[0]) for tensor, _ in batch])
        return super().launch(batch)


class Counts:
    """Launches and flushes since it was reset."""

    def __init__(self) -> None:
        self.rows: list[Counted] = []
        self.flushes = 0

    def make(self, device: torch.device) -> Counted:
        self.rows.append(Counted(device))
        return self.rows[-1]

    @property
    def launches(self) -> int:
        return sum(len(rows.launched) for rows in self.rows)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """CPU tensors are measured in batches, as a GPU's, and what that takes is counted."""
    found, flush = Counts(), Recorders.flush

    def counted(recorder: Recorders) -> None:
        found.flushes += 1
        flush(recorder)

    monkeypatch.setattr(recorders, "BEHIND", frozenset({"cpu", "cuda"}))
    monkeypatch.setattr(recorders, "device_rows", found.make)
    monkeypatch.setattr(Recorders, "flush", counted)
    return found


@pytest.fixture
def pair() -> Iterator[None]:
    """A group of two whose other process is only pretended: collectives copy what this one puts in."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def watched(directory: Path, work: Callable[[], object]) -> Trace:
    directory.mkdir(exist_ok=True)
    writer = TraceWriter(directory)
    instruments = Instruments(writer)
    instruments.start()
    work()
    instruments.stop()
    writer.close()
    return read_trace(directory)


def of_one_step(counts: Counts, directory: Path, net: nn.Module) -> tuple[int, int, Trace]:
    """Flushes and launches of an ordinary training step."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    found = []

    def train() -> None:
        for _ in range(STEPS):
            before = counts.flushes, counts.launches
            net(torch.ones(4, 16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append((counts.flushes - before[0], counts.launches - before[1]))

    trace = watched(directory, train)
    return *found[-1], trace


def blocks() -> nn.Sequential:
    """Layers, each of two linear modules."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(BLOCKS)))


@pytest.mark.usefixtures("pair")
def test_a_sharded_step_is_flushed_no_more_often_than_any_other(tmp_path: Path, counts: Counts) -> None:
    """Each unit gathers twice and scatters once a step; every operand and result is measured.

    A gathering whose operand is a part of its result is launched by itself here, because this group's backend writes to the
    result by an operator of torch, which counts as a change. NCCL does not.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    flushes, launches, _ = of_one_step(counts, tmp_path / "whole", blocks())
    net = blocks()
    for unit in (*net, net):
        fully_shard(unit, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    sharded_flushes, sharded_launches, trace = of_one_step(counts, tmp_path / "sharded", net)
    gathered, scattered = 2 * BLOCKS, BLOCKS
    seen = [trace.sites[s.site] for s in trace.samples if s.step == STEPS]
    assert sum((site.kind, site.cls) == ("received", "all_gather") for site in seen) == gathered
    assert sum((site.kind, site.cls) == ("received", "reduce_scatter") for site in seen) == scattered
    assert sum(site.kind == "sent" for site in seen) == gathered + scattered
    assert sharded_flushes == flushes
    assert sharded_launches <= launches + gathered
    assert trace.collectives == STEPS * (gathered + scattered)


gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""The same collective by its present name, or by that which it had until torch 2.12."""


@pytest.mark.usefixtures("pair")
def test_collectives_that_overwrite_nothing_are_launched_together(tmp_path: Path, counts: Counts) -> None:
    """Of a dozen in a row none is flushed; each is measured."""
    size, found = 12, []

    def work() -> None:
        for _ in range(2):  # in the second round no place is new
            before = counts.launches
            for number in range(size):
                gather(torch.empty(8), torch.full((4,), float(number)))
            found.append(counts.launches - before)

    trace = watched(tmp_path, work)
    assert found[1] == 0
    sent = [s.absmax for s in trace.samples if trace.sites[s.site].kind == "sent"]
    assert sent == [float(number) for number in range(size)] * 2


@pytest.mark.usefixtures("alone")
def test_what_the_next_collective_overwrites_is_measured_before(tmp_path: Path, counts: Counts) -> None:
    """One buffer for the results of several, as sharded optimizers use it: each result has its own magnitude."""
    buffer = torch.empty(4)

    def work() -> None:
        for number in (1.0, 2.0, 3.0, 4.0):
            gather(buffer, torch.full((4,), number))

    trace = watched(tmp_path, work)
    received = [s.absmax for s in trace.samples if trace.sites[s.site].kind == "received"]
    assert received == [1.0, 2.0, 3.0, 4.0]
    assert counts.launches > 1


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    current = {"is": 1}
    monkeypatch.setattr(batches, "_stream_getter", lambda device: lambda: current["is"])
    return current


def test_going_to_and_fro_between_streams_launches_nothing(stream: dict[str, int]) -> None:
    """One launch for each stream in the end, the modules' own one last: results are written in that order."""
    rows = Counted(torch.device("cpu"))
    made = Batches(rows, torch.device("cpu"))
    made.begin_call()
    for number in range(6):
        stream["is"] = 1 + number % 2
        made.add(torch.full((2,), float(number)))
    assert rows.launched == []
    made.launch()
    assert rows.launched == [[5.0, 3.0, 1.0], [4.0, 2.0, 0.0]]


def test_a_gate_on_another_stream_is_not_waited_for(stream: dict[str, int]) -> None:
    """Its result may not be there when this stream reads it: the tensor is measured whatever the gate says."""
    made = Batches(Counted(torch.device("cpu")), torch.device("cpu"))
    here, tensors = made.add(torch.ones(2)), [torch.ones(2), torch.ones(2)]
    assert made.add(tensors[0], here).gate is here
    stream["is"] = 2
    assert made.add(tensors[1], here).gate is None


def test_a_part_of_a_buffer_counts_as_the_whole_of_it(stream: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the buffer alive: what waits on other streams is bounded by memory that is held."""
    monkeypatch.setattr(batches, "KEPT_BYTES", 1 << 12)
    rows = Counted(torch.device("cpu"))
    made = Batches(rows, torch.device("cpu"))
    made.begin_call()
    stream["is"] = 2
    part: Tensor = torch.ones(1 << 12)[:4]
    made.add(part)
    assert len(rows.launched) == 1


@pytest.mark.usefixtures("alone")
def test_memory_that_sharding_has_freed_is_never_read(tmp_path: Path, counts: Counts) -> None:
    """A program that evaluates before it makes its optimizer gives it the parameters that FSDP2 gathers and frees."""
    from torch.distributed.fsdp import fully_shard

    net = blocks()
    for unit in (*net, net):
        fully_shard(unit)
    root = nn.Sequential(net, nn.Linear(16, 16))
    fully_shard(root)

    def train() -> None:
        with torch.no_grad():
            root(torch.ones(4, 16))
        optimizer = torch.optim.SGD(root.parameters(), lr=0.01)
        for _ in range(2):
            root(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    trace = watched(tmp_path / "evaluated", train)
    assert trace.damage == ()
    assert not any("dtypedoctor failed there" in note.why for note in trace.all(NotWatched))
    assert counts.launches > 0
