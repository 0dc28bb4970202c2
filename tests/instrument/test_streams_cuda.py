"""Rows of several CUDA streams are read after what writes them, and not after their memory has been given away."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.model import Trace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: streams exist there only"),
]

SIZE = 1 << 24
CYCLES = 20_000_000
"""About 10 ms of a GPU's clock: long enough that whoever does not wait reads too early."""


class Late(nn.Module):
    """Returns memory full of NaN that a slow kernel on the current stream fills with ones."""

    def forward(self, trash: Tensor) -> Tensor:
        found = torch.empty_like(trash).copy_(trash)
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        return found.fill_(1.0)


@pytest.fixture
def trash() -> Tensor:
    """NaN on the device."""
    return torch.full((SIZE,), float("nan"), device="cuda")


def outputs(trace: Trace) -> list[Any]:
    """The samples of what modules returned."""
    return [s for s in trace.samples if trace.sites[s.site].kind == "output"]


@pytest.mark.parametrize("first", ["default", "side"])
def test_a_row_is_read_behind_the_work_of_the_stream_that_it_was_handed_over_on(
    tmp_path: Path, trash: Tensor, first: str
) -> None:
    """Whichever stream the recorder sees first, a tensor of another one is measured after the kernel that writes it."""
    side = torch.cuda.Stream()
    other = torch.cuda.default_stream()
    streams = [other, side] if first == "default" else [side, other]

    def work(_: Instruments) -> None:
        late = nn.Sequential(Late())
        for _ in range(4):
            for stream in streams:
                with torch.cuda.stream(stream):
                    late(trash)
            torch.cuda.synchronize()

    trace = watched(tmp_path, work)
    assert len(outputs(trace)) == 16
    assert all(s.finite and s.absmax == 1.0 for s in outputs(trace))


def test_memory_of_another_streams_pool_is_not_reused_before_its_row_is_read(tmp_path: Path, trash: Tensor) -> None:
    """A tensor that was allocated on one stream and returned on another keeps its memory until it has been measured."""
    side = torch.cuda.Stream()

    class Passes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(-1)

    def work(_: Instruments) -> None:
        passes = Passes()
        for _ in range(12):
            with torch.cuda.stream(side):
                x = torch.ones(SIZE, device="cuda")
                passes(x)
            torch.cuda.default_stream().wait_stream(side)
            torch.cuda._sleep(CYCLES)
            passes(x)
            del x
            with torch.cuda.stream(
                side
            ):  # the memory comes back at once, and this does not wait for the default stream
                torch.empty(SIZE, device="cuda").copy_(trash)
            torch.cuda.synchronize()

    trace = watched(tmp_path, work)
    assert outputs(trace)
    assert all(s.finite for s in outputs(trace))


def test_storages_that_are_freed_before_their_batch_are_left_out(tmp_path: Path) -> None:
    """FSDP frees parameters by resizing their storage: no address is read that is not the tensor's any more."""

    class Frees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            found = self.first(x * 2)
            result = found.sum()
            found.untyped_storage().resize_(0)
            return result

    def work(_: Instruments) -> None:
        net = Frees()
        with torch.no_grad():
            for _ in range(6):
                net(torch.ones(1024, device="cuda"))
        torch.cuda.synchronize()

    trace = watched(tmp_path, work)
    assert any("freed" in note.why for note in trace.all(NotWatched))
    assert all(s.finite for s in outputs(trace))
