"""NF4 dequantise through a shared buffer: the faults of the buffer and of the choice of kernel, and their corrections."""

from collections.abc import Iterator

import pytest
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu, dequantize_4bit
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
from torch import nn

from dtypedoctor.corrections.contract import TargetMismatchError, put_in
from dtypedoctor.tickets.fused_llama import dequantize as kernel
from dtypedoctor.tickets.fused_llama.fused_lora import Base, lora_matmul

SHAPE = (64, 128)
ORDERS = [("bf16", "f16"), ("f16", "bf16")]


@pytest.fixture(autouse=True)
def fresh_buffers() -> Iterator[None]:
    """No buffer is left from another test, and no correction is left behind."""
    kernel.BUFFERS.clear()
    before = (kernel.shared_buffer, kernel.choose_kernel)
    yield
    assert (kernel.shared_buffer, kernel.choose_kernel) == before


@pytest.fixture(scope="module")
def fused() -> nn.Module:
    """A model that runs through the kernels."""
    return nf4_llama("bf16", "bf16")


def load(dtype: str, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantises one weight of a model in ``dtype`` through the buffer; returns a copy and the exact values."""
    base = packed(SHAPE, DTYPES[dtype], seed)
    return kernel.dequantize(base.weight, base.state, use_buffer=True).clone(), exact(base)


@pytest.mark.parametrize("use_buffer", [False, True])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_single_dtype_is_dequantised_as_bitsandbytes_does_it(dtype: str, nested: bool, use_buffer: bool) -> None:
    """Values and dtype are bitsandbytes' own, bit for bit, also for the transposed form of the packed bytes."""
    base = packed(SHAPE, DTYPES[dtype], 1, nested)
    expected = dequantize_4bit(base.weight, base.state)
    found = kernel.dequantize(base.weight, base.state, use_buffer=use_buffer)
    assert found.dtype == DTYPES[dtype]
    assert torch.equal(found, expected)
    assert torch.equal(kernel.dequantize(base.weight.t(), base.state, use_buffer=use_buffer), expected.t())


def test_a_dense_weight_is_returned_as_it_is() -> None:
    """Without a quantisation state there is nothing to do."""
    weight = normal(SHAPE, 1)
    assert kernel.dequantize(weight, None, use_buffer=True) is weight


@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_a_second_dtype_is_read_through_the_buffer_of_the_first(first: str, second: str) -> None:
    """The bit patterns of one 16-bit format are read as the other: finite values that have nothing to do with the weight."""
    load(first)
    found, expected = load(second, seed=6)
    assert found.dtype == DTYPES[first]
    assert torch.isfinite(found).all()
    error = relative_error(found, expected)
    assert error == pytest.approx(1.0, abs=1e-6) if first == "bf16" else error > 10
    base = packed(SHAPE, DTYPES[second], 6)
    right = kernel.dequantize(base.weight, base.state)
    assert torch.equal(found.view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_misread_weights_miss_the_absmax_of_their_blocks(first: str, second: str) -> None:
    """Each block holds an element of code ±1, so its largest magnitude is its absmax: an equation that misread bits break."""
    load(first)
    base = packed(SHAPE, DTYPES[second], 6, nested=False)
    absmax = base.state.absmax
    right = kernel.dequantize(base.weight, base.state).float().view(-1, 64).abs().amax(dim=1)
    assert torch.allclose(right, absmax, rtol=2**-8)
    wrong = kernel.dequantize(base.weight, base.state, use_buffer=True).float().view(-1, 64).abs().amax(dim=1)
    ratio = wrong / absmax
    assert bool((ratio < 1e-6).all() if first == "bf16" else (ratio > 2).all())


@pytest.mark.parametrize(("first", "second"), ORDERS)
@pytest.mark.parametrize("autocast", ["off", "f16", "bf16"])
def test_a_sequential_load_raises_unless_autocast_has_the_second_dtype(first: str, second: str, autocast: str) -> None:
    """Without autocast the base product mixes the dtypes; with autocast of the first dtype the sum in place does."""
    load(first)
    base, X, A, B = projection(second)
    names = {"f16": "Half", "bf16": "BFloat16"}
    if autocast == second:
        with region(autocast):
            assert torch.isfinite(lora_matmul(X, base.weight, base.state, A, B, 1.0)).all()
        return
    with region(autocast), pytest.raises(RuntimeError) as raised:
        lora_matmul(X, base.weight, base.state, A, B, 1.0)
    expected = f"mm {names[second]} {names[first]}" if autocast == "off" else f"addmm_ {names[first]} {names[second]}"
    assert cause(raised.value) == expected


@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_a_sequential_load_under_autocast_computes_garbage_in_silence(first: str, second: str) -> None:
    """Autocast casts the misread weight to the activations' dtype: relative error one, or far more, and all finite."""
    load(first)
    base, X, A, B = projection(second)
    with region(second):
        out = lora_matmul(X, base.weight, base.state, A, B, 1.0)
    error = relative_error(out, X.float() @ exact(base).t())
    assert torch.isfinite(out).all()
    assert error == pytest.approx(1.0, abs=1e-3) if second == "f16" else error > 10


def projection(dtype: str) -> tuple[Base, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A packed projection, its input, and adapters that add nothing (B is zero)."""
    X = normal((2, 3, SHAPE[1]), 2).to(DTYPES[dtype])
    return packed(SHAPE, DTYPES[dtype], 6), X, normal((4, SHAPE[1]), 3), torch.zeros(SHAPE[0], 4)


@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_a_stale_buffer_hides_a_quant_state_that_disagrees_with_the_activations(first: str, second: str) -> None:
    """The second model's activations have the first one's dtype, as the buffer: no autocast, no error, and garbage."""
    load(first)
    base = packed(SHAPE, DTYPES[second], 6)
    X = normal((3, SHAPE[1]), 2).to(DTYPES[first])
    out = lora_matmul(X, base.weight, base.state, None, None, 1.0)
    assert relative_error(out, X.float() @ exact(base).t()) > 0.9


@pytest.mark.parametrize("correction", ["dequant-buffer-keyed-by-dtype", "dequant-no-shared-buffer"])
@pytest.mark.parametrize(("first", "second"), ORDERS)
def test_buffers_that_know_their_dtype_cure_sequential_loads(
    fused: nn.Module, correction: str, first: str, second: str
) -> None:
    """Both models' weights are right within rounding, in any order and again; the fault is back when undone."""
    with corrected(fused, correction) as [installed]:
        for dtype in (first, second, first):
            found, expected = load(dtype)
            assert found.dtype == DTYPES[dtype]
            assert relative_error(found, expected) < ROUNDING[dtype]
        assert installed.counters.hits == 3
        assert "shared_buffer now runs fused_llama/dequantize.py" in installed.proof
    load(first)
    assert load(second)[0].dtype == DTYPES[first]


def test_the_buffer_grows_and_keeps_its_dtype() -> None:
    """A larger weight gets a larger buffer, which is all that the original looks at."""
    load("bf16")
    big = packed((128, 256), torch.float16, 7)
    assert kernel.dequantize(big.weight, big.state, use_buffer=True).dtype == torch.bfloat16


@pytest.mark.parametrize("use_buffer", [False, True])
def test_a_float32_state_gets_the_bfloat16_kernel_and_half_a_matrix(use_buffer: bool) -> None:
    """The 16-bit kernel fills the first half of the float32 memory with pairs of its values, the rest stays untouched."""
    base = packed(SHAPE, torch.float32, 8)
    found = kernel.dequantize(base.weight, base.state, use_buffer=use_buffer)
    assert found.dtype == torch.float32
    half = SHAPE[0] // 2
    assert not found[half:].any()
    written = found[:half].flatten().view(torch.bfloat16).float().view(SHAPE)
    assert relative_error(written, exact(base)) < ROUNDING["bf16"]
    assert relative_error(found, exact(base)) == pytest.approx(1.22, abs=0.03)


def test_the_float32_kernel_cures_a_float32_state(fused: nn.Module) -> None:
    """The corrected choice gives bitsandbytes' own float32 values; the 16-bit kernels are as before; undone cleanly."""
    base = packed(SHAPE, torch.float32, 8)
    with corrected(fused, "dequant-float32-kernel") as [installed]:
        assert torch.equal(kernel.dequantize(base.weight, base.state), exact(base))
        assert relative_error(*load("f16")) < ROUNDING["f16"]
        assert installed.counters.hits == 2
    assert relative_error(kernel.dequantize(base.weight, base.state), exact(base)) > 1


def test_a_float32_kernel_does_not_write_beyond_a_16_bit_buffer(fused: nn.Module) -> None:
    """Where the real kernel would corrupt memory, this one raises and says by how much."""
    load("bf16")
    base = packed(SHAPE, torch.float32, 8)
    message = "would write 32768 bytes into a buffer of 16384"
    with corrected(fused, "dequant-float32-kernel"), pytest.raises(RuntimeError, match=message):
        kernel.dequantize(base.weight, base.state, use_buffer=True)


def test_bytes_reordered_for_the_cpu_kernel_are_refused() -> None:
    """bitsandbytes reorders the bytes in an eval-mode forward on some CPUs; reading them as before would be garbage."""
    base = packed(SHAPE, torch.float16, 9, nested=False)
    weight, state = _convert_weight_packed_for_cpu(base.weight, base.state)
    with pytest.raises(RuntimeError, match="reordered by an eval-mode forward"):
        kernel.dequantize(weight, state)


@pytest.mark.parametrize(
    "name", ["dequant-buffer-keyed-by-dtype", "dequant-no-shared-buffer", "dequant-float32-kernel"]
)
def test_a_model_without_fused_kernels_is_refused(name: str) -> None:
    """A correction whose target does not run is not installed in silence."""
    with pytest.raises(TargetMismatchError, match="no module of Linear runs through the fused LoRA kernels"):
        put_in(name, nn.Linear(2, 2), ())


def test_two_corrections_of_one_step_are_refused(fused: nn.Module) -> None:
    """The second one would hide the first, so it raises and names what is there."""
    with (
        corrected(fused, "dequant-no-shared-buffer"),
        pytest.raises(TargetMismatchError, match="already replaced by buffer_of_its_own"),
    ):
        put_in("dequant-buffer-keyed-by-dtype", fused, ())


def test_a_step_with_other_parameters_is_refused(fused: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference of the signatures is in the message."""
    monkeypatch.setattr(kernel, "choose_kernel", lambda dtype, device: dtype)
    with pytest.raises(
        TargetMismatchError, match=r"takes \(dtype, device\), this correction was written for \(dtype\)"
    ):
        put_in("dequant-float32-kernel", fused, ())
    monkeypatch.undo()
