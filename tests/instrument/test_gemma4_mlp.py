"""Gemma-4's MLP and its correction, on transformers' real class."""

from importlib.resources import files
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextMLP

from dtypedoctor.corrections.contract import install_edits
from dtypedoctor.lab.tickets.gemma4 import SAFE_LIMIT, gemma4_tiny, install_mlp_float32_product
from dtypedoctor.plugins import Correction, registered


def mlp(scale: float = 1.0) -> tuple[nn.Module, Gemma4TextMLP]:
    """A tiny Gemma-4 and its first MLP with scaled gate and up projections."""
    torch.manual_seed(0)
    model = gemma4_tiny()
    layer = model.model.layers[0].mlp
    with torch.no_grad():
        layer.gate_proj.weight.mul_(scale)
        layer.up_proj.weight.mul_(scale)
    return model, layer


def test_the_limit_is_exact_in_both_half_formats_and_the_next_value_is_not() -> None:
    """65280 survives float16 and bfloat16; 65504 turns into 65536 in bfloat16, which float16 cannot hold."""
    assert torch.tensor(SAFE_LIMIT).half().float().item() == SAFE_LIMIT
    assert torch.tensor(SAFE_LIMIT).bfloat16().float().item() == SAFE_LIMIT
    assert torch.tensor(65504.0).bfloat16().half().isinf()
    assert torch.tensor(SAFE_LIMIT + 128).bfloat16().float().item() != SAFE_LIMIT + 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes_take_the_original_path_bit_for_bit(dtype: torch.dtype) -> None:
    """Only float16 is touched."""
    model, layer = mlp(50.0)
    model.to(dtype)
    x = torch.randn(5, 64, dtype=dtype)
    expected = layer(x)
    installed = install_mlp_float32_product(model, [])
    try:
        assert torch.equal(layer(x), expected)
        assert installed.counters.hits == 0
    finally:
        installed.undo()


def test_elements_that_are_lost_are_counted_as_rescued() -> None:
    """An inf in the gate spoils whole rows of the result: they become zero, and the count says so."""
    model, layer = mlp()
    model.half()
    x = torch.randn(3, 64).half()
    x[1, 0] = torch.inf
    installed = install_mlp_float32_product(model, [])
    try:
        out = layer(x)
        assert (out[1] == 0).all()
        assert installed.counters.elements("rescued") == 64
    finally:
        installed.undo()


def test_the_edit_of_transformers_makes_the_test_pass_that_it_proposes() -> None:
    """Without it the product is inf; a product within the range is what it was, in every dtype."""
    correction = registered(Correction)["transformers-gemma4-mlp-product"]
    text = files("dtypedoctor.lab.corrections.libraries").joinpath(correction.test).read_text(encoding="utf-8")
    proposed: dict[str, Any] = {}
    exec(compile(text, correction.test, "exec"), proposed)  # noqa: S102
    beyond = proposed["test_a_product_beyond_float16_is_finite_forward_and_backward"]
    with pytest.raises(AssertionError):
        beyond()
    installed = install_edits(correction)
    try:
        beyond()
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            proposed["test_a_product_within_the_range_is_unchanged"](dtype)
    finally:
        installed.undo()
    assert installed.counters.hits == 4
