"""Strict mode: disagreements that a cast or autocast would hide become errors that name the dtypes."""

from collections.abc import Iterator

import pytest
import torch
from fused_llama import (
    Block,
    corrected,
    nf4_llama,
    normal,
    packed,
    region,
)
from torch import nn

from dtypedoctor.tickets.fused_llama import dequantize, fused_lora
from dtypedoctor.tickets.fused_llama.fused_lora import MixedDtypesError


@pytest.fixture(autouse=True)
def fresh_kernels() -> Iterator[None]:
    """No buffer is left from another test, and no correction is left behind."""
    dequantize.BUFFERS.clear()
    before = dict(vars(fused_lora))
    yield
    assert dict(vars(fused_lora)) == before


@pytest.fixture(scope="module")
def fused() -> nn.Module:
    """A model that runs through the kernels."""
    return nf4_llama("bf16", "bf16")


STRICT = [
    ("off", "bf16", "f16", "the dequantized weight is torch.float16 but the activations are torch.bfloat16"),
    ("bf16", "bf16", "f16", "the dequantized weight is torch.float16 but the activations are torch.bfloat16"),
    ("f16", "bf16", "bf16", "autocast is torch.float16 but the activations are torch.bfloat16"),
    ("off", "f32", "f32", "quant_state is torch.float32, its kernel torch.bfloat16, the buffer torch.float32"),
]


@pytest.mark.parametrize("nets", [(), ("cast-after-dequantize", "out-of-place-addmm", "backward-autocast-off")])
@pytest.mark.parametrize(("autocast", "x", "w", "message"), STRICT)
def test_strict_mode_raises_where_a_cast_or_autocast_would_hide_it(
    fused: nn.Module, nets: tuple[str, ...], autocast: str, x: str, w: str, message: str
) -> None:
    """The safety nets may be in place before or after it; the disagreement is named all the same."""
    for ids in ((*nets, "strict"), ("strict", *nets)):
        with corrected(fused, *ids), region(autocast), pytest.raises(MixedDtypesError, match=message):
            Block.build("mlp", x, w).forward()


def test_strict_mode_finds_a_stale_buffer_under_autocast(fused: nn.Module) -> None:
    """The silent form becomes an error that names the three dtypes."""
    other = packed((64, 64), torch.bfloat16, 1)
    dequantize.dequantize(other.weight, other.state, use_buffer=True)
    message = "quant_state is torch.float16, its kernel torch.float16, the buffer torch.bfloat16"
    with corrected(fused, "strict"), region("f16"), pytest.raises(MixedDtypesError, match=message):
        Block.build("qkv", "f16", "f16").forward()


@pytest.mark.parametrize(("autocast", "dtype"), [("off", "f16"), ("bf16", "bf16")])
def test_strict_mode_changes_nothing_in_a_healthy_block(fused: nn.Module, autocast: str, dtype: str) -> None:
    """Outputs and gradients are bitwise those of the original; each weight was checked."""
    block = Block.build("mlp", dtype, dtype)
    with region(autocast):
        expected = block.forward()
    with corrected(fused, "strict") as [installed], region(autocast):
        found = block.forward()
        gradients = block.backward(found)
        assert installed.counters.hits == 6
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(gradients, block.backward(expected), strict=True))


def test_strict_mode_refuses_a_packed_decode_kernel_of_another_dtype(fused: nn.Module) -> None:
    """The kernel would misread the bits of the activations; strict mode raises before it runs."""
    base = packed((32, 64), torch.float16, 1)
    row = normal((1, 64), 2).to(torch.bfloat16)
    message = "quant_state is torch.float16, its kernel torch.float16, the activations are torch.bfloat16"
    with corrected(fused, "strict"), pytest.raises(MixedDtypesError, match=message):
        fused_lora.packed_gemv(row, base.weight, base.state)
