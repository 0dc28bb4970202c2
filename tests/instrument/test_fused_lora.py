"""Fused LoRA projections: which combinations of autocast, activations and quant_state raise where, and what cures them."""

from collections.abc import Iterator

import pytest
import torch
from fused_llama import (
    ROUNDING,
    Block,
    cause,
    corrected,
    nf4_llama,
    outcome_of,
    packed,
    region,
    relative_error,
)
from torch import nn

from dtypedoctor.corrections.contract import TargetMismatchError, put_in
from dtypedoctor.tickets.fused_llama import dequantize, fused_lora

pytestmark = pytest.mark.slow


KINDS = ("o", "qkv", "mlp")

FORWARD = """
off  f16  f16  ok
off  f16  bf16 mm Half BFloat16
off  f16  f32  mm Half float
off  bf16 f16  mm BFloat16 Half
off  bf16 bf16 ok
off  bf16 f32  mm BFloat16 float
off  f32  f16  mm float Half
off  f32  bf16 mm float BFloat16
off  f32  f32  ok
f16  f16  f16  ok
f16  f16  bf16 ok
f16  f16  f32  ok
f16  bf16 f16  addmm_ Half BFloat16
f16  bf16 bf16 addmm_ Half BFloat16
f16  bf16 f32  addmm_ Half BFloat16
f16  f32  f16  addmm_ Half Float
f16  f32  bf16 addmm_ Half Float
f16  f32  f32  addmm_ Half Float
bf16 f16  f16  addmm_ BFloat16 Half
bf16 f16  bf16 addmm_ BFloat16 Half
bf16 f16  f32  addmm_ BFloat16 Half
bf16 bf16 f16  ok
bf16 bf16 bf16 ok
bf16 bf16 f32  ok
bf16 f32  f16  addmm_ BFloat16 Float
bf16 f32  bf16 addmm_ BFloat16 Float
bf16 f32  f32  addmm_ BFloat16 Float
"""
"""autocast, X, quant_state, outcome of the forward pass; the same for the three fused functions."""

BACKWARD = """
off  f16  f16  ok                    ok
off  f16  bf16 mm Half BFloat16      mm Half BFloat16
off  f16  f32  mm Half float         mm Half float
off  bf16 f16  mm BFloat16 Half      mm BFloat16 Half
off  bf16 bf16 ok                    ok
off  bf16 f32  mm BFloat16 float     mm BFloat16 float
off  f32  f16  mm float Half         mm float Half
off  f32  bf16 mm float BFloat16     mm float BFloat16
off  f32  f32  ok                    ok
f16  f16  f16  ok                    ok
f16  f16  bf16 ok                    addmm_ Half BFloat16
f16  f16  f32  ok                    addmm_ Half Float
f16  bf16 f16  addmm_ BFloat16 Half  addmm_ BFloat16 Half
f16  bf16 bf16 addmm_ BFloat16 Half  addmm_ BFloat16 Half
f16  bf16 f32  addmm_ BFloat16 Half  addmm_ BFloat16 Half
f16  f32  f16  addmm_ Float Half     addmm_ Float Half
f16  f32  bf16 addmm_ Float Half     addmm_ Float Half
f16  f32  f32  addmm_ Float Half     addmm_ Float Half
bf16 f16  f16  addmm_ Half BFloat16  addmm_ Half BFloat16
bf16 f16  bf16 addmm_ Half BFloat16  addmm_ Half BFloat16
bf16 f16  f32  addmm_ Half BFloat16  addmm_ Half BFloat16
bf16 bf16 f16  ok                    addmm_ BFloat16 Half
bf16 bf16 bf16 ok                    ok
bf16 bf16 f32  ok                    addmm_ BFloat16 Float
bf16 f32  f16  addmm_ Float BFloat16 addmm_ Float BFloat16
bf16 f32  bf16 addmm_ Float BFloat16 addmm_ Float BFloat16
bf16 f32  f32  addmm_ Float BFloat16 addmm_ Float BFloat16
"""
"""autocast, X, quant_state, outcome of the backward pass of one projection, and of QKV and MLP.

The forward pass before it is corrected where it would raise, so that the backward pass is reached.
"""


def rows(table: str) -> list[list[str]]:
    """The lines of a table; columns end at fixed places."""
    lines = (line for line in table.splitlines() if line)
    return [[part.strip() for part in (line[:5], line[5:10], line[10:15], line[15:36], line[36:])] for line in lines]


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("autocast", "x", "w", "outcome", "_"), rows(FORWARD))
def test_the_forward_pass_raises_exactly_where_dtypes_meet(
    kind: str, autocast: str, x: str, w: str, outcome: str, _: str
) -> None:
    """Without autocast the base product decides; with it only the sum in place, whatever quant_state says."""
    block = Block.build(kind, x, w)
    assert outcome_of(block, autocast) == outcome


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("autocast", "x", "w", "one", "several"), rows(BACKWARD))
def test_the_backward_pass_raises_exactly_where_dtypes_meet(
    fused: nn.Module, kind: str, autocast: str, x: str, w: str, one: str, several: str
) -> None:
    """It runs in the autocast state of the forward pass; sums in place over several weights show a quant_state that differs."""
    block = Block.build(kind, x, w)
    with corrected(fused, "cast-after-dequantize", "out-of-place-addmm"), region(autocast):
        outputs = block.forward()
    try:
        block.backward(outputs)
    except RuntimeError as error:
        found = cause(error)
    else:
        found = "ok"
    assert found == (one if kind == "o" else several)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("autocast", "dtype"), [("off", "f16"), ("off", "bf16"), ("f16", "f16"), ("bf16", "bf16")])
def test_healthy_blocks_equal_the_float32_reference(kind: str, autocast: str, dtype: str) -> None:
    """Outputs and all gradients are within the dtype's rounding of plain autograd in float32."""
    block = Block.build(kind, dtype, dtype)
    assert_close_to_reference(block, autocast, ROUNDING[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_block_equals_plain_autograd(fused: nn.Module, kind: str) -> None:
    """The hand-written gradients are the derivatives of the forward pass."""
    with corrected(fused, "dequant-float32-kernel"):
        assert_close_to_reference(Block.build(kind, "f32", "f32"), "off", ROUNDING["f32"])


def assert_close_to_reference(block: Block, autocast: str, bound: float) -> None:
    """Compares outputs and gradients with the float32 reference."""
    with region(autocast):
        outputs = block.forward()
    gradients = block.backward(outputs)
    expected_outputs, expected_gradients = block.reference()
    pairs = zip([*outputs, *gradients], [*expected_outputs, *expected_gradients], strict=True)
    errors = [relative_error(found, expected) for found, expected in pairs]
    assert max(errors) < bound, errors


CURES = [
    (("cast-after-dequantize", "backward-autocast-off"), "off", "bf16", "f16", "mm BFloat16 Half"),
    (("cast-after-dequantize", "backward-autocast-off"), "off", "f16", "bf16", "mm Half BFloat16"),
    (("out-of-place-addmm",), "f16", "bf16", "bf16", "addmm_ Half BFloat16"),
    (("out-of-place-addmm",), "f16", "f32", "f16", "addmm_ Half Float"),
    (("out-of-place-addmm", "backward-autocast-off"), "f16", "bf16", "f16", "addmm_ Half BFloat16"),
    (("out-of-place-addmm", "backward-autocast-off"), "bf16", "f32", "bf16", "addmm_ BFloat16 Float"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ids", "autocast", "x", "w", "error"), CURES)
def test_a_cured_block_equals_the_float32_reference_and_fails_again_when_undone(
    fused: nn.Module, kind: str, ids: tuple[str, ...], autocast: str, x: str, w: str, error: str
) -> None:
    """Forward and gradients are within the coarsest dtype's rounding; every correction was hit; undoing brings the error back."""
    block = Block.build(kind, x, w)
    with corrected(fused, *ids) as installed:
        assert_close_to_reference(block, autocast, ROUNDING["bf16"])
        assert all(correction.counters.hits for correction in installed)
    assert outcome_of(block, autocast) == error


@pytest.mark.parametrize("kind", ["qkv", "mlp"])
def test_a_quant_state_hidden_by_autocast_is_cured_in_the_backward_pass(fused: nn.Module, kind: str) -> None:
    """Under bfloat16 autocast the forward pass needs no correction; the backward one needs its weights cast."""
    block = Block.build(kind, "bf16", "f16")
    with corrected(fused, "backward-autocast-off") as [installed]:
        assert_close_to_reference(block, "bf16", ROUNDING["bf16"])
        assert installed.counters.hits == 1 + len(block.bases)
        assert "run_backward now runs" in installed.proof
        assert "backward_weight now runs" in installed.proof
    with region("bf16"):
        outputs = block.forward()
    with pytest.raises(RuntimeError) as raised:
        block.backward(outputs)
    assert cause(raised.value) == "addmm_ BFloat16 Half"


@pytest.mark.parametrize("kind", KINDS)
def test_casting_after_dequantize_does_not_cure_autocast_of_another_dtype(fused: nn.Module, kind: str) -> None:
    """The low-rank product still comes in autocast's dtype, so the error only moves to the other operand."""
    with corrected(fused, "cast-after-dequantize"):
        assert outcome_of(Block.build(kind, "bf16", "bf16"), "f16") == "addmm_ operands Half BFloat16"


def test_casting_after_dequantize_turns_a_stale_buffer_into_garbage(fused: nn.Module) -> None:
    """The cast hides the dtype of misread weights: what raised before now computes, and computes nonsense."""
    other = packed((64, 64), torch.float16, 1)
    dequantize.dequantize(other.weight, other.state, use_buffer=True)
    block = Block.build("o", "bf16", "bf16")
    assert outcome_of(block, "off") == "mm BFloat16 Half"
    with corrected(fused, "cast-after-dequantize"):
        [out] = block.forward()
    assert relative_error(out, block.reference()[0][0]) > 1


def test_half_of_a_correction_is_not_left_behind(fused: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the second of two steps does not match, the first one is put back."""
    original = fused_lora.run_backward
    monkeypatch.setattr(fused_lora, "backward_weight", lambda weight, state: weight)
    with pytest.raises(TargetMismatchError, match=r"backward_weight takes \(weight, state\)"):
        put_in("backward-autocast-off", fused, ())
    assert fused_lora.run_backward is original
    monkeypatch.undo()
