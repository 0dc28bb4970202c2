"""The watch keeps nothing of the program alive: peak memory with it is that of the program, and what is deleted is freed."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from watched import op_trace

from dtypedoctor.instrument import batches
from dtypedoctor.instrument.batches import NormRows
from dtypedoctor.instrument.budget import Budget
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.trace.events import Header
from dtypedoctor.trace.writer import TraceWriter

MIB = 1 << 20
SIZE = 40 * MIB
"""Bytes of one temporary: the C library gives memory of this size back to the system when it is freed."""
ALLOWED = 64 * MIB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's high-water mark"),
]


@contextmanager
def instruments(directory: Path, **options: Any) -> Iterator[Instruments]:
    """Inside, the process is watched."""
    writer = TraceWriter(directory)
    writer.write(Header())
    found = Instruments(writer, **options)
    found.start()
    try:
        yield found
    finally:
        found.stop()
        writer.close()


@contextmanager
def no_collector() -> Iterator[None]:
    """Inside, what only a cycle keeps alive stays alive."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def status(name: str) -> int:
    """A number of bytes from the process's status."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def peak(work: Callable[[], object]) -> int:
    """Most memory that the process holds at any moment of ``work``, beyond what it holds before."""
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    work()
    return status("VmHWM") - before


class Makes(nn.Module):
    """Returns a large tensor that nobody keeps."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ones(SIZE // x.element_size(), dtype=x.dtype) * x


class Returns(nn.Module):
    """Returns what is made of its argument."""

    def __init__(self, wrap: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        return self.wrap(x)


class Temporaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Makes() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for part in self.parts:
            total = total + part(x).sum()
        return total


def temporaries() -> Callable[[], object]:
    """Outputs that are dropped at once, with gradients on."""
    net, x = Temporaries(), torch.ones(())
    return lambda: net(x)


def without_gradients() -> Callable[[], object]:
    """A chain of modules of which only the last result is held."""
    net, x = nn.Sequential(*(nn.ReLU() for _ in range(6))), torch.ones(SIZE // 4)

    def work() -> None:
        with torch.no_grad():
            net(x)

    return work


def generation() -> Callable[[], object]:
    """Two tokens after a long prompt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, num_hidden_layers=4, intermediate_size=10240, num_attention_heads=1, num_key_value_heads=1,
        vocab_size=64,
    )  # fmt: skip
    net, tokens = LlamaForCausalLM(config).eval(), torch.zeros(1, 1024, dtype=torch.int64)
    return lambda: net.generate(tokens, max_new_tokens=2, min_new_tokens=2, do_sample=False, pad_token_id=0)


def overflowing() -> Callable[[], object]:
    """Half-precision activations that overflow and end in finite values, as a norm makes them; written in place, too."""
    x = torch.full((SIZE // 2,), 300.0, dtype=torch.float16)

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul(x).rsqrt_().mul_(x).neg_()

    net = Norm()

    def work() -> None:
        with torch.no_grad():
            net(x)

    return work


def repeated() -> Callable[[], object]:
    """Outputs that ``expand`` repeats, not contiguous, and full of inf: reading them makes copies."""
    x = torch.full((SIZE // 4,), float("inf"))
    wraps = (
        lambda x: x[:1].expand(1 << 16, 1 << 12),
        lambda x: x.reshape(64, -1)[:, ::2],
    )
    nets = [Returns(wrap) for wrap in wraps]
    return lambda: [net(x) for net in nets]


def without_modules() -> Callable[[], object]:
    """Plain tensors, some of which overflow."""
    x = torch.full((SIZE // 4,), 2.0)

    def work() -> None:
        for _ in range(2):
            y = (x * 1e30) * 1e30
            y = torch.where(y.isinf(), 0.0, y)

    return work


def training() -> Callable[[], object]:
    """A step whose activations autograd holds."""
    net, x = nn.Sequential(*(nn.ReLU() for _ in range(4))), torch.ones(SIZE // 4, requires_grad=True)

    def work() -> None:
        net(x).sum().backward()
        x.grad = None

    return work


def half_training() -> Callable[[], object]:
    """Many half-precision activations that autograd holds: a float32 value beside each would be three times the program."""
    x = torch.full((MIB,), 1.01, dtype=torch.float16, requires_grad=True)

    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    net = nn.Sequential(*(Scale() for _ in range(8)), *(nn.Tanh() for _ in range(24)))

    def work() -> None:
        net(x).float().sum().backward()
        x.grad = None

    return work


def attention() -> Callable[[], object]:
    """Scores that are scaled and masked in float16 before their softmax."""
    q = torch.randn(8, 1024, 16).half()
    mask = torch.zeros(1024, 1024, dtype=torch.float16)

    class Attend(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            scores = torch.bmm(q, q.transpose(1, 2))
            for _ in range(6):
                scores = scores * 0.9 + mask
            return torch.bmm(scores.softmax(-1), q)

    net = nn.Sequential(*(Attend() for _ in range(2)))

    def work() -> None:
        with torch.no_grad():
            net(q)

    return work


PROGRAMS = [temporaries, without_gradients, generation, training, overflowing, repeated, without_modules]


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("program", PROGRAMS)
def test_peak_memory_is_that_of_the_program(program: Callable[[], Any], tmp_path: Path) -> None:
    """With every ``every``, in calls with a routine look and in such without one, no output outlives its use."""
    work, found = program(), {}
    with no_collector():
        work()
        bare = peak(work)
        for every in (1, 0, 2):
            (tmp_path / str(every)).mkdir()
            with instruments(tmp_path / str(every), budget=Budget(every=every) if every != 1 else None):
                found[every] = [peak(work) for _ in range(3 if every == 1 else 1)]  # the third has no routine look
    assert max(max(one) for one in found.values()) <= 1.02 * bare + ALLOWED, found


@pytest.mark.release
@pytest.mark.parametrize("program", [temporaries, without_gradients, half_training, attention])
def test_peak_memory_under_the_op_trace_is_that_of_the_program(program: Callable[[], Any], tmp_path: Path) -> None:
    """What records each operator keeps none of its operands."""
    work = program()
    with no_collector():
        work()
        bare = peak(work)
        with instruments(tmp_path) as watching, op_trace(watching):
            found = peak(work)
    assert found <= 1.02 * bare + ALLOWED


def test_a_view_counts_as_the_memory_that_it_keeps_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few elements of a large tensor fill the batch that a device may keep; as many of their own do not."""
    monkeypatch.setattr(batches, "KEPT_BYTES", 1 << 12)
    device = torch.device("cpu")
    kept = batches.Batches(NormRows(device), device)
    assert kept.add(torch.ones(4)).tensor is not None
    assert kept.add(torch.ones(1 << 12)[:4]).tensor is None
