"""Angles that half precision has rounded, in tables and where a sine is taken; and those that it has not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watched import watched

from dtypedoctor.diagnosis import diagnose
from dtypedoctor.instrument.silent.rounding import _rounded

FREQUENCIES = 10000 ** (-torch.arange(0, 32, 2) / 32)
BFLOAT16, HALF = torch.bfloat16, torch.float16


class Apply(nn.Module):
    """Does one thing with a buffer."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], table: Tensor = FREQUENCIES) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.table)


def evidence(directory: Path, net: nn.Module, x: Tensor) -> list[tuple[str, bool]]:
    """What is found of a call: the ids, and whether each is proven."""
    return [(f.id, f.confidence == "proven") for f in diagnose(watched(directory, lambda _: net(x)))]


def table(dtype: torch.dtype, wave: Callable[[Tensor], Tensor] = torch.cos, rows: int = 400) -> Tensor:
    """Sines of angles that are computed in ``dtype``, as a row for each position."""
    return wave(torch.outer(torch.arange(rows).to(dtype), FREQUENCIES.to(dtype))).float()


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize("wave", [torch.cos, torch.sin])
@pytest.mark.parametrize(("dtype", "rows"), [(BFLOAT16, 400), (HALF, 4096)])
def test_a_table_of_rounded_angles_is_found(
    tmp_path: Path, wave: Callable[[Tensor], Tensor], dtype: torch.dtype, rows: int
) -> None:
    """A model computes its table when it is made, outside of all calls."""
    net = lambda: Apply(lambda x, t: x * t.flatten()[0], table(dtype, wave, rows)[None, None])
    findings = diagnose(watched(tmp_path, lambda _: net()(torch.ones(3))))
    assert [(f.id, f.confidence == "proven") for f in findings] == [("rounded-rotary-buffer", True)]


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    "healthy",
    [
        lambda: table(torch.float32),
        lambda: table(torch.float32, torch.sin).half(),
        lambda: table(BFLOAT16, rows=64),
        lambda: torch.cos(torch.outer(torch.arange(400) / 8, FREQUENCIES)).bfloat16(),
    ],
    ids=["float32", "cast-when-finished", "short", "stretched"],
)
def test_other_buffers_are_no_tables_of_rounded_angles(tmp_path: Path, healthy: Callable[[], Tensor]) -> None:
    """A finished table may be cast; of a short one no angle is off by much."""
    net = lambda: Apply(lambda x, t: x * t.flatten()[0], healthy())
    assert diagnose(watched(tmp_path, lambda _: net()(torch.ones(3)))) == ()


def embedding(t: Tensor, frequencies: Tensor) -> Tensor:
    """Sines of numbers, as diffusion models embed a timestep."""
    angles = t[:, None] * frequencies[None]
    return torch.cat([angles.sin(), angles.cos()], -1)


TIMES = torch.tensor([3, 999, 257, 514, 700])


@pytest.mark.release(all_but=2)
@pytest.mark.parametrize(
    "cast",
    [
        lambda t, f: embedding(t.bfloat16().float(), f),
        lambda t, f: embedding(t.unsqueeze(-1).to(BFLOAT16).float().repeat(1, 2)[:, 0], f),
        lambda t, f: embedding((t + 9000).half().float(), f),
        lambda t, f: embedding(t.bfloat16(), f.bfloat16()),
    ],
    ids=["and-back", "repeated", "float16", "never-back"],
)
def test_timesteps_in_half_precision_are_found(tmp_path: Path, cast: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Two timesteps become one; a cast back does not part them."""
    assert ("rounded-rotary-buffer", True) in evidence(tmp_path, Apply(cast), TIMES)


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("made", "found"),
    [
        (lambda: TIMES.bfloat16(), True),
        (lambda: (TIMES + 9000).half(), True),
        (lambda: torch.ones(700).bfloat16().cumsum(0) - 1, True),
        (lambda: TIMES.half(), False),
        (lambda: TIMES.float(), False),
        (lambda: torch.ones(200).bfloat16().cumsum(0) - 1, False),
    ],
    ids=["bfloat16", "float16", "counted", "exact-in-float16", "float32", "few-counted"],
)
def test_timesteps_that_are_cast_before_the_call_are_found(
    tmp_path: Path, made: Callable[[], Tensor], found: bool
) -> None:
    """The script casts the batch, and the model computes its angles in float32."""
    net = Apply(lambda t, f: embedding(t.float(), f))
    trace = watched(tmp_path, lambda _: [net(made()), net(made())])
    assert [(f.id, f.confidence == "proven") for f in diagnose(trace)] == [("rounded-rotary-buffer", True)] * found


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    "healthy",
    [
        embedding,
        lambda t, f: embedding(t.float(), f).bfloat16(),
        lambda t, f: embedding((t % 256).bfloat16().float(), f),
        lambda t, f: embedding(t.bfloat16() / 1000, f.bfloat16()).float(),
        lambda t, f: f * t.bfloat16().sum().float(),
        lambda t, f: torch.sin((t.float()[:, None] * f).bfloat16() / 100),
    ],
    ids=["int", "cast-when-finished", "exact", "small-angles", "no-sine", "small-after-division"],
)
def test_sines_of_exact_angles_are_no_finding(tmp_path: Path, healthy: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Casts that lose nothing, angles too small to matter, and numbers of which nobody takes a sine."""
    assert evidence(tmp_path, Apply(healthy), TIMES) == []


@pytest.mark.parametrize("size", [16, 64, 128])
def test_the_error_of_a_rounded_table_is_that_of_the_frequencies_that_it_was_made_of(size: int) -> None:
    """Also where the last of its values is rounded as much as any."""
    exact = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    table = _rounded("inv_freq", exact.half(), 4096)
    assert table is not None
    assert table.told.angle_error == pytest.approx(float((exact.half() - exact).abs().max()) * 4096, rel=0.03)
