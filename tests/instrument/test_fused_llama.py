"""The fused Llama of the tickets: parity with unfused float32, and the faults of its kernels and of their shared buffer."""

from collections.abc import Iterator

import pytest
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu, dequantize_4bit
from fused_llama import (
    DTYPES,
    corrected,
    exact,
    nf4_llama,
    packed,
    region,
    relative_error,
)
from torch import Tensor, nn
from transformers import DynamicCache

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.models.builtin import llama_tiny
from dtypedoctor.lab.tickets import dequantize, fused_lora
from dtypedoctor.lab.tickets.fused_llama import fuse, is_fused

pytestmark = pytest.mark.slow


SHAPE = (64, 128)
BFLOAT16 = 0.1
"""Relative error of a gradient that bfloat16 may make. How its sums are rounded is the processor's: 0.03 to 0.06 has been seen."""


@pytest.fixture(autouse=True)
def fresh_kernels() -> Iterator[None]:
    """No buffer is left from another test, and no correction is left behind."""
    dequantize.BUFFERS.clear()
    before = dict(vars(fused_lora)), dict(vars(dequantize))
    yield
    assert (dict(vars(fused_lora)), dict(vars(dequantize))) == before


@pytest.fixture(scope="module")
def fused() -> nn.Module:
    """A model that runs through the kernels."""
    return nf4_llama("bf16", "bf16")


def loss_and_gradients(model: nn.Module, autocast: str = "off") -> tuple[float, dict[str, Tensor]]:
    tokens = torch.randint(4, 200, (2, 12), generator=torch.Generator().manual_seed(1))
    with region(autocast):
        loss = model(input_ids=tokens, labels=tokens).loss
    model.zero_grad()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def float32_reference(model: nn.Module) -> tuple[float, dict[str, Tensor]]:
    """The same for peft's own forward passes over the same weights, dequantised once, all in float32."""
    dense = nf4_llama("f32", "f32")
    dense.load_state_dict(
        {k: v.float() for k, v in model.state_dict().items() if "base_layer.weight" not in k}, strict=False
    )
    for name, module in list(dense.named_modules()):
        vars(module).pop("forward", None)
        if name.endswith("base_layer"):
            linear = nn.Linear(module.in_features, module.out_features, bias=False)
            weight = model.get_submodule(name).weight
            linear.weight.data = exact(fused_lora.Base(weight=weight.data, state=weight.quant_state))
            dense.get_submodule(name.rpartition(".")[0]).base_layer = linear.requires_grad_(False)
    assert not any(is_fused(module) for module in dense.modules())
    return loss_and_gradients(dense)


def test_the_fused_model_equals_pefts_own_forward_passes() -> None:
    """Fusing changes how projections run, not what they compute."""
    model = nf4_llama("bf16", "bf16")
    loss, gradients = loss_and_gradients(model)
    expected_loss, expected = float32_reference(model)
    assert loss == pytest.approx(expected_loss, rel=2e-3)
    assert len(gradients) == 28
    assert max(relative_error(gradients[name], expected[name]) for name in expected) < BFLOAT16


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_key_value_cache_is_filled_under_its_new_and_its_old_name(name: str) -> None:
    """transformers 5.24 renamed the argument; a forward that takes any others too would generate without a cache, in silence."""
    cache, attention = DynamicCache(), fuse(llama_tiny(layers=1)).get_submodule("model.layers.0.self_attn")
    angles = torch.zeros(1, 3, attention.head_dim)
    attention(torch.ones(1, 3, 64), (angles.cos(), angles.sin()), None, **{name: cache})
    assert cache.get_seq_length() == 3


def test_projections_that_cannot_be_fused_are_refused() -> None:
    """Dropout on the adapter, a bias, or a model that is no Llama: one message each, never a silent approximation."""
    with pytest.raises(UsageError, match="Linear has no Llama MLP or attention to fuse"):
        fuse(nn.Linear(2, 2))
    model = nf4_llama("bf16", "bf16")
    mlp = model.get_submodule("base_model.model.model.layers.0.mlp")
    mlp.up_proj.lora_dropout["default"] = nn.Dropout(0.1)
    with pytest.raises(UsageError, match="take one plain LoRA adapter"):
        mlp(torch.zeros(1, 2, 64, dtype=DTYPES["bf16"]))
    mlp.gate_proj.base_layer.bias = nn.Parameter(torch.zeros(128))
    with pytest.raises(UsageError, match="take no bias"):
        mlp(torch.zeros(1, 2, 64, dtype=DTYPES["bf16"]))


def load(dtype: str, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantises one weight of a model in ``dtype`` through the buffer; returns a copy and the exact values."""
    base = packed(SHAPE, DTYPES[dtype], seed)
    return dequantize.dequantize(base.weight, base.state, use_buffer=True).clone(), exact(base)


@pytest.mark.parametrize("use_buffer", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_single_dtype_is_dequantised_as_bitsandbytes_does_it(dtype: str, nested: bool, use_buffer: bool) -> None:
    """Values and dtype are bitsandbytes' own, bit for bit, also for the transposed form of the packed bytes."""
    base = packed(SHAPE, DTYPES[dtype], 1, nested)
    expected = dequantize_4bit(base.weight, base.state)
    found = dequantize.dequantize(base.weight, base.state, use_buffer=use_buffer)
    assert found.dtype == DTYPES[dtype]
    assert torch.equal(found, expected)
    assert torch.equal(dequantize.dequantize(base.weight.t(), base.state, use_buffer=use_buffer), expected.t())


def test_a_float32_kernel_does_not_write_beyond_a_16_bit_buffer(fused: nn.Module) -> None:
    """Where the real kernel would corrupt memory, this one raises and says by how much."""
    load("bf16")
    base = packed(SHAPE, torch.float32, 8)
    message = "would write 32768 bytes into a buffer of 16384"
    with corrected(fused, "dequant-float32-kernel"), pytest.raises(RuntimeError, match=message):
        dequantize.dequantize(base.weight, base.state, use_buffer=True)


def test_bytes_reordered_for_the_cpu_kernel_are_refused() -> None:
    """bitsandbytes reorders the bytes in an eval-mode forward on some CPUs; reading them as before would be garbage."""
    base = packed(SHAPE, torch.float16, 9, nested=False)
    weight, state = _convert_weight_packed_for_cpu(base.weight, base.state)
    with pytest.raises(RuntimeError, match="reordered by an eval-mode forward"):
        dequantize.dequantize(weight, state)
