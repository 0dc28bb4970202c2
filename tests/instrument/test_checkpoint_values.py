"""What a checkpoint's weights become in float16, counted from their bytes, against torch's own cast."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dtypedoctor.diagnosis import preflight
from dtypedoctor.diagnosis.checkpoint import Intent, read_checkpoint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_outside_of_float16_are_counted_as_its_cast_makes_them(dtype: torch.dtype, tmp_path: Path) -> None:
    """Of magnitudes from 1e-12 to 1e12, with zeros and both signs, and names of the tensors that have any."""
    generator = torch.Generator().manual_seed(0)
    spread = (10 ** (torch.rand(40_000, generator=generator) * 24 - 12) * (-1) ** torch.arange(40_000)).to(dtype)
    spread[::7] = 0
    # what rounds to the borders is not told apart
    spread[(spread.abs() >= 65_504) & (spread.abs() < 65_536) | (spread.abs() == 2**-25)] = 1
    tame = torch.linspace(-1, 1, 64).to(dtype)
    save_file({"wide.weight": spread, "tame.weight": tame}, tmp_path / "model.safetensors")
    subject = read_checkpoint(tmp_path, Intent(dtype="float16"))
    cast = spread.half()
    became_zero = ((cast == 0) & (spread != 0)).sum().item()
    assert subject.outside_float16 == {"wide.weight": (cast.isinf().sum().item(), became_zero)}
    finding = preflight(subject)[0]
    assert finding.summary.startswith(f"{cast.isinf().sum().item():,} weights beyond float16's range: wide.weight")


def test_values_are_read_only_where_float16_is_asked_for(tmp_path: Path) -> None:
    """Inspecting a checkpoint costs its headers otherwise."""
    save_file({"w": torch.full((4,), 1e9)}, tmp_path / "model.safetensors")
    assert read_checkpoint(tmp_path, Intent(dtype="bfloat16")).outside_float16 == {}
    assert preflight(read_checkpoint(tmp_path, Intent())) == ()
