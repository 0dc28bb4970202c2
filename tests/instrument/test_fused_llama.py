"""The fused Llama as a whole: decoding, parity with unfused float32, sequential loads, quant_state as a correction."""

from collections.abc import Iterator

import pytest
import torch
from fused_llama import (
    DTYPES,
    ROUNDING,
    cause,
    corrected,
    exact,
    nf4_llama,
    normal,
    packed,
    region,
    relative_error,
)
from torch import Tensor, nn
from transformers import DynamicCache

from dtypedoctor.corrections.contract import TargetMismatchError, put_in
from dtypedoctor.errors import UsageError
from dtypedoctor.models.builtin import llama_tiny
from dtypedoctor.tickets.fused_llama import dequantize, fused_lora
from dtypedoctor.tickets.fused_llama.model import fuse, is_fused

pytestmark = pytest.mark.slow


BFLOAT16 = 0.1
"""Relative error of a gradient that bfloat16 may make. How its sums are rounded is the processor's: 0.03 to 0.06 has been seen."""


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


def decode(x: str, w: str, autocast: str) -> tuple[Tensor, Tensor]:
    """One new token for each of two sequences, and the float32 reference."""
    base = packed((32, 64), DTYPES[w], 1)
    X, A, B = normal((2, 1, 64), 2).to(DTYPES[x]), normal((4, 64), 3, 0.1), normal((32, 4), 4, 0.1)
    with region(autocast), torch.no_grad():
        found = fused_lora.decode_linear(X, base, A, B)
    return found, X.float() @ exact(base).t() + base.scale * (X.float() @ A.t()) @ B.t()


@pytest.mark.parametrize(("autocast", "dtype"), [("off", "f16"), ("off", "bf16"), ("bf16", "bf16")])
def test_decoding_one_token_equals_the_float32_reference(autocast: str, dtype: str) -> None:
    """Where all dtypes agree the decode path is right within rounding."""
    found, expected = decode(dtype, dtype, autocast)
    assert found.dtype == DTYPES[dtype]
    assert relative_error(found, expected) < ROUNDING[dtype]


@pytest.mark.parametrize(
    ("autocast", "x", "w", "error"),
    [
        ("off", "bf16", "f16", "mm BFloat16 Half"),
        ("bf16", "bf16", "f16", "mm BFloat16 Half"),
        ("f16", "bf16", "f16", "mm BFloat16 Half"),
        ("f16", "bf16", "bf16", "addmm_ operands Half BFloat16"),
        ("f16", "f32", "f16", "mm float Half"),
    ],
)
def test_decoding_raises_even_under_autocast_and_is_cured_in_the_input_dtype(
    fused: nn.Module, autocast: str, x: str, w: str, error: str
) -> None:
    """A product with ``out=`` is not cast by autocast; the correction computes in the activations' dtype."""
    with corrected(fused, "decode-in-input-dtype") as [installed]:
        found, expected = decode(x, w, autocast)
        assert found.dtype == DTYPES[x]
        assert relative_error(found, expected) < ROUNDING["bf16"]
        assert installed.counters.hits == 1
    with pytest.raises(RuntimeError) as raised:
        decode(x, w, autocast)
    assert cause(raised.value) == error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the packed decode kernel exists on CUDA only")
def test_the_packed_decode_kernel_misreads_activations_of_another_dtype() -> None:
    """The kernel of quant_state's dtype reads the bits of the activations as its own format: no error, and garbage."""
    for w, silent in (("bf16", False), ("f16", True)):
        base = packed((32, 64), DTYPES[w], 1)
        X = normal((1, 1, 64), 2).to(DTYPES["bf16"])
        expected = X.float() @ exact(base).t()
        base.state.to("cuda")
        on_gpu = fused_lora.Base(weight=base.weight.cuda(), state=base.state)
        found = fused_lora.decode_linear(X.cuda(), on_gpu, None, None).cpu()
        assert torch.isfinite(found).all()
        assert (relative_error(found, expected) > 0.5) == silent


def loss_and_gradients(model: nn.Module, autocast: str = "off") -> tuple[float, dict[str, Tensor]]:
    """Loss on fixed tokens, and the gradients of the adapters."""
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


def test_setting_quant_state_dtype_cures_a_model_and_is_undone() -> None:
    """Loss and gradients equal the float32 reference within bfloat16's rounding; the states get their dtype back."""
    model = nf4_llama("bf16", "f16")
    expected_loss, expected = float32_reference(model)
    with corrected(model, "quant-state-dtype") as [installed]:
        loss, gradients = loss_and_gradients(model)
        assert installed.counters.hits == 14
        assert installed.proof == "14 of 14 quant_states were changed; all now say torch.bfloat16"
    assert loss == pytest.approx(expected_loss, rel=2e-3)
    assert gradients.keys() == expected.keys()
    assert max(relative_error(gradients[name], expected[name]) for name in expected) < BFLOAT16
    with pytest.raises(RuntimeError) as raised:
        loss_and_gradients(model)
    assert cause(raised.value) == "mm BFloat16 Half"


@pytest.mark.parametrize(
    ("dtype", "state", "message"),
    [
        ("bf16", "bf16", "there is nothing to set: each of 14 quant_states already says torch.bfloat16"),
        ("f32", "f16", "there is no dequantize kernel for torch.float32"),
    ],
)
def test_setting_quant_state_dtype_is_refused_where_it_cannot_help(dtype: str, state: str, message: str) -> None:
    """Nothing is changed where nothing differs, or where the change would make the weights silently wrong."""
    with pytest.raises(TargetMismatchError, match=message):
        put_in("quant-state-dtype", nf4_llama(dtype, state), ())


def test_setting_quant_state_dtype_needs_packed_weights_and_an_embedding() -> None:
    """A model without either is refused with the reason."""
    with pytest.raises(TargetMismatchError, match="LlamaForCausalLM has no packed weights"):
        put_in("quant-state-dtype", llama_tiny(), ())
    with pytest.raises(TargetMismatchError, match="Linear has no input embedding"):
        put_in("quant-state-dtype", nn.Linear(2, 2), ())


def test_the_fused_model_equals_pefts_own_forward_passes() -> None:
    """Fusing changes how projections run, not what they compute."""
    model = nf4_llama("bf16", "bf16")
    loss, gradients = loss_and_gradients(model)
    expected_loss, expected = float32_reference(model)
    assert loss == pytest.approx(expected_loss, rel=2e-3)
    assert len(gradients) == 28
    assert max(relative_error(gradients[name], expected[name]) for name in expected) < BFLOAT16


def test_the_decode_path_generates_what_the_fused_functions_generate() -> None:
    """Greedy tokens are the same with and without the decode path; disabling the adapters changes them."""
    prompt = torch.randint(4, 200, (2, 6), generator=torch.Generator().manual_seed(2))
    tokens = [
        nf4_llama("f16", "f16", decode_path=path).generate(prompt, max_new_tokens=4, do_sample=False)
        for path in (True, False)
    ]
    assert torch.equal(tokens[0], tokens[1])
    model = nf4_llama("f16", "f16")
    with torch.no_grad():
        adapted = model(prompt).logits
        with model.disable_adapter():
            assert relative_error(model(prompt).logits, adapted) > 0.01


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


def test_two_models_in_one_process_share_the_buffer_and_a_correction_parts_them() -> None:
    """The second model raises, or under autocast trains on garbage; with a buffer per dtype it does as in a fresh process."""
    expected, _ = loss_and_gradients(nf4_llama("f16", "f16"), "f16")
    dequantize.BUFFERS.clear()
    loss_and_gradients(nf4_llama("bf16", "bf16"))
    second = nf4_llama("f16", "f16")
    with pytest.raises(RuntimeError) as raised:
        loss_and_gradients(second)
    assert cause(raised.value) == "mm Half BFloat16"
    silent, gradients = loss_and_gradients(second, "f16")
    assert abs(silent - expected) > 1e-3
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
    with corrected(second, "dequant-buffer-keyed-by-dtype"):
        assert loss_and_gradients(second, "f16")[0] == expected
