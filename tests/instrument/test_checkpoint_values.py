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
    spread[spread.abs() == 2**-25] = 1  # what rounds to this border is not told apart
    border = torch.tensor([65_519.0, 65_520.0, -65_520.0, 65_535.0, 65_280.0, 1.8e38, 3e38, -3e38])
    bad = torch.tensor([float("nan"), float("inf"), -float("inf")])
    spread[1:12] = torch.cat([border, bad]).to(dtype)
    tame = torch.linspace(-1, 1, 64).to(dtype)
    save_file({"wide.weight": spread, "tame.weight": tame}, tmp_path / "model.safetensors")
    subject = read_checkpoint(tmp_path, Intent(dtype="float16"))
    cast = spread.half()
    became_inf = (cast.isinf() & spread.isfinite()).sum().item()
    became_zero = ((cast == 0) & (spread != 0)).sum().item()
    assert subject.outside_float16 == {"wide.weight": (became_inf, became_zero, 3)}
    nonfinite, beyond = preflight(subject)
    assert nonfinite.summary == "3 weights of the files are inf or NaN: wide.weight."
    assert beyond.summary.startswith(f"{became_inf:,} weights beyond float16's range: wide.weight")


def test_values_are_read_only_where_float16_is_asked_for(tmp_path: Path) -> None:
    """Inspecting a checkpoint costs its headers otherwise."""
    save_file({"w": torch.full((4,), 1e9)}, tmp_path / "model.safetensors")
    assert read_checkpoint(tmp_path, Intent(dtype="bfloat16")).outside_float16 == {}
    assert preflight(read_checkpoint(tmp_path, Intent())) == ()
