"""Collectives as one process of a group sees them: gloo, a group of one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from observed import observed
from torch import Tensor, nn
from torch import distributed as dist

from dtypedoctor.diagnosis.distributed import calls_of
from dtypedoctor.instrument.contents import tensors_in
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.instrument.statistics import local_part, measurable
from dtypedoctor.trace.events import NotWatched, Op
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.reader import read_trace
from dtypedoctor.trace.records.execution import CollectiveCall
from dtypedoctor.trace.writer import TraceWriter


class Watched:
    """Watches a block; ``trace`` afterwards."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> Self:
        self._writer = TraceWriter(self._directory)
        self._instruments = Instruments(self._writer)
        self._instruments.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._instruments.stop()
        self._writer.close()
        self.trace: Trace = read_trace(self._directory)

    def seen(self) -> list[tuple[str, str, str, float, int]]:
        """Kind, collective, index, magnitude and bad elements of everything that was sent and received."""
        sites = self.trace.sites
        return [
            (site.kind, site.cls, site.index, sample.absmax, sample.num_nan + sample.num_inf)
            for sample in self.trace.samples
            if (site := sites[sample.site]).kind in ("sent", "received")
        ]


@pytest.mark.usefixtures("group")
def test_what_goes_in_and_what_comes_back_is_measured(tmp_path: Path) -> None:
    """Before a collective that overwrites its operand, and after it has been waited for."""
    with Watched(tmp_path) as watched:
        tensor = torch.tensor([2.0, float("inf")])
        dist.all_reduce(tensor)
        parts = [torch.empty(2)]
        dist.all_gather(parts, torch.tensor([3.0, 1.0]))
        dist.broadcast(torch.tensor([5.0]), src=0)
    assert watched.seen() == [
        ("sent", "all_reduce", "0:0", 2.0, 1),
        ("received", "all_reduce", "0:0", 2.0, 1),
        ("sent", "all_gather", "0:0", 3.0, 0),
        ("received", "all_gather", "0:0", 3.0, 0),
        ("sent", "broadcast", "0:0", 5.0, 0),
        ("received", "broadcast", "0:0", 5.0, 0),
    ]
    (told,) = observed(watched.trace, "process-group")
    assert told.values == {"name": "0", "ranks": [0], "backend": "gloo", "rank": 0}


@pytest.mark.usefixtures("group")
def test_an_asynchronous_collective_is_measured_when_somebody_waits_for_it(tmp_path: Path) -> None:
    """Until then its result may not be there."""
    with Watched(tmp_path) as watched:
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        tensor.fill_(9.0)  # the program goes on with it
    assert watched.seen() == [("sent", "all_reduce", "0:0", 1.0, 0), ("received", "all_reduce", "0:0", 1.0, 0)]


@pytest.fixture
def pair() -> Iterator[Any]:
    """A group of two whose other process is only pretended: messages go nowhere, and none changes a tensor."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.usefixtures("pair")
def test_messages_are_measured_with_where_they_come_from_and_go_to(tmp_path: Path) -> None:
    """What is sent when it is sent; what is received when somebody has waited for it. A tag is part of the way."""
    with Watched(tmp_path) as watched:
        dist.send(torch.tensor([2.0, float("nan")]), 1)
        dist.recv(torch.tensor([3.0]), 1)
        arriving, leaving = torch.tensor([5.0]), torch.tensor([4.0])
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, arriving, 1, tag=7), dist.P2POp(dist.isend, leaving, 1)])
        for work in works:
            work.wait()
    assert sorted(watched.seen()) == [  # in which order a batch is issued is torch's affair
        ("received", "recv", "0:1>0", 3.0, 0),
        ("received", "recv", "0:1>0/7", 5.0, 0),
        ("sent", "send", "0:0>1", 2.0, 1),
        ("sent", "send", "0:0>1", 4.0, 0),
    ]


def test_what_is_put_together_has_arrived_when_the_work_of_all_is_waited_for(tmp_path: Path, pair: Any) -> None:
    """As NCCL does it: operators that are coalesced have no works of their own, and nothing is there before the last one."""
    first, second = torch.tensor([0.0]), torch.tensor([0.0])
    with Watched(tmp_path) as watched:
        pair._start_coalescing(torch.device("cpu"))
        for tensor in (first, second):
            dist.irecv(tensor, 1)
        work = pair._end_coalescing(torch.device("cpu"))
        first.detach().fill_(1.0)
        second.data.fill_(2.0)
        work.wait()
    assert [(kind, index, absmax) for kind, _, index, absmax, _ in watched.seen()] == [
        ("received", "0:1>0", 1.0),
        ("received", "0:1>0", 2.0),
    ]


@pytest.mark.usefixtures("group")
def test_the_reducer_of_ddp_is_seen_and_gradients_are_what_they_are_unwatched(tmp_path: Path) -> None:
    """It is C++ and calls no function of Python; what it reduces is known when the backward pass is over."""

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        net(torch.ones(2, 4)).square().sum().backward()
        return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]

    alone = gradients()
    with Watched(tmp_path) as watched:
        under_watch = gradients()
    assert all(torch.equal(one, other) for one, other in zip(alone, under_watch, strict=True))
    reduced = [seen for seen in watched.seen() if seen[1] == "all_reduce"]
    largest = max(float(gradient.abs().max()) for gradient in alone)
    assert [kind for kind, *_ in reduced] == ["sent", "received"]
    assert all(absmax == pytest.approx(largest) for _, _, _, absmax, _ in reduced)
    assert not watched.trace.all(NotWatched)


@pytest.mark.usefixtures("group")
def test_the_functions_of_torch_distributed_are_put_back_after_the_watch(tmp_path: Path) -> None:
    """After the watch no collective passes through it any more."""
    wait = dist.Work.wait
    with Watched(tmp_path) as watched:
        assert dist.Work.wait is not wait
    dist.all_reduce(torch.ones(1))
    assert dist.Work.wait is wait
    assert watched.seen() == []


@pytest.mark.usefixtures("group")
def test_a_collective_is_neither_traced_nor_repeated(tmp_path: Path) -> None:
    """A first call is looked at operator by operator, but one rank that repeats a collective alone breaks those of all."""

    class Reducing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gathered = torch.full((4,), float("nan"), dtype=torch.float16)
            dist.all_gather([gathered], x)
            return gathered * 2

    with Watched(tmp_path) as watched:
        Reducing()(torch.ones(4, dtype=torch.float16))
    assert [kind for kind, *_ in watched.seen()] == ["sent", "received"]
    assert not observed(watched.trace, "absorbed")
    assert not watched.trace.all(Op)


@pytest.mark.usefixtures("group")
def test_of_a_spread_tensor_the_local_part_is_measured() -> None:
    """A DTensor is not read as a whole, which would communicate."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    spread = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [Shard(0)])
    assert not measurable(spread)
    assert measurable(local_part(spread))
    assert [(path, type(part)) for path, part in tensors_in({"hidden": spread})] == [("hidden", Tensor)]
    plain = torch.ones(1)
    assert local_part(plain) is plain


@pytest.mark.usefixtures("group")
def test_every_call_is_known_from_the_records_of_those_that_were_not_to_be_expected(tmp_path: Path) -> None:
    """A loop that repeats itself writes nothing more, and another dtype in the middle of it is seen where it is."""
    expected = []
    with Watched(tmp_path) as watched:
        for step in range(40):
            dist.all_reduce(torch.ones(2))
            expected.append(("all_reduce", "float32"))
            for _ in range(2 if step % 3 else 1):
                dist.broadcast(torch.ones(2, dtype=torch.float16), src=0)
                expected.append(("broadcast", "float16"))
            if step == 30:
                dist.all_reduce(torch.ones(2, dtype=torch.bfloat16))
                expected.append(("all_reduce", "bfloat16"))
    called = calls_of(watched.trace)["0"]
    assert [(call.seen.what.name, call.seen.what.dtype) for call in called] == expected
    assert {call.seen.what.source.rpartition(":")[0] for call in called if call.seen.what.source} == {
        "test_collectives.py"
    }


ROUNDS: dict[str, list[tuple[str, int]]] = {
    "buckets and a metric": [("float32", 3), ("float64", 1)],
    "two runs": [("float32", 2), ("float64", 1), ("float32", 5), ("float16", 2)],
    "one call": [("float32", 7)],
    "in turn": [("float32", 1), ("float64", 1), ("float32", 1), ("float16", 1)],
}


@pytest.mark.release(all_but=1)
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("calls", ROUNDS.values(), ids=ROUNDS)
def test_the_records_of_a_loop_do_not_grow_with_its_steps(tmp_path: Path, calls: list[tuple[str, int]]) -> None:
    """Whatever it calls several times in a row: each bucket of gradients is reduced at the same line."""
    counts = []
    for steps in (10, 60):
        (tmp_path / str(steps)).mkdir()
        with Watched(tmp_path / str(steps)) as watched:
            for _ in range(steps):
                for dtype, times in calls:
                    for _ in range(times):
                        dist.all_reduce(torch.ones(2, dtype=getattr(torch, dtype)))
        called = calls_of(watched.trace)["0"]
        assert [call.seen.what.dtype for call in called] == steps * [d for d, times in calls for _ in range(times)]
        counts.append(len(watched.trace.observed(CollectiveCall)))
    assert counts[0] == counts[1] < 30
