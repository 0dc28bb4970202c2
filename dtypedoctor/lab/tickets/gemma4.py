"""A tiny Gemma-4, from transformers' own code, and corrections of such models: MLP product, RMSNorm, embedding, attention in float32."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from dtypedoctor.corrections.contract import (
    Counters,
    Installed,
    TargetMismatchError,
    replace_attribute,
    require_signature,
)
from dtypedoctor.lab.corrections.keep_float32 import OWN, install_keep_float32
from dtypedoctor.lab.models.builtin import SPECIAL_TOKENS, VOCABULARY_SIZE


def gemma4_tiny(*, layers: int = 2, hidden: int = 64, intermediate: int = 128) -> nn.Module:
    """Gemma-4's text model with full attention, 2 heads of 16 dimensions and no per-layer inputs."""
    config = Gemma4TextConfig(
        vocab_size=VOCABULARY_SIZE,
        vocab_size_per_layer_input=VOCABULARY_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=16,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        layer_types=["full_attention"] * layers,
        max_position_embeddings=512,
        **SPECIAL_TOKENS,
    )
    return Gemma4ForCausalLM(config)


SAFE_LIMIT = 65280.0
"""The largest value that float16 and bfloat16 both represent exactly; 65504 would round up to 65536 in bfloat16."""

Layer = Callable[[Tensor], Tensor]


def gated_mlp_float32_product(
    x: Tensor, gate_proj: Layer, up_proj: Layer, down_proj: Layer, activation: Layer, counters: Counters
) -> Tensor:
    """Computes ``down_proj(activation(gate_proj(x)) * up_proj(x))`` with the product in float32, clamped to ±65,280, cast back before ``down_proj``.

    Where the gate is not float16 the original formula runs, bit for bit. Elements that the limit changes are counted as
    ``clamped``. ``down_proj`` may still give NaN or inf (one NaN in a row of the product spoils the whole row of the
    result, its own accumulation may overflow); such elements are set to zero, so that the residual passes unchanged, and
    counted as ``rescued``: a run with many of them trains without this MLP.

    Args:
        x: hidden states, (..., hidden).
        gate_proj, up_proj: (..., hidden) to (..., intermediate).
        down_proj: (..., intermediate) to (..., hidden).
        activation: elementwise, applied to the gate.
        counters: count calls, and the elements that are changed.

    Returns:
        (..., hidden) in the dtype of ``down_proj``'s output.
    """
    gate = gate_proj(x)
    if gate.dtype is not torch.float16:
        return down_proj(activation(gate) * up_proj(x))
    counters.hit()
    product = activation(gate.float()) * up_proj(x).float()
    counters.add("clamped", product.abs() > SAFE_LIMIT)
    out = down_proj(product.clamp(-SAFE_LIMIT, SAFE_LIMIT).to(gate.dtype))
    counters.add("rescued", ~torch.isfinite(out))
    return torch.nan_to_num(out, nan=0.0, posinf=0.0, neginf=0.0)


MLP, SIGNATURE = "Gemma4TextMLP", ("self", "x")


def install_mlp_float32_product(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Gives the MLPs of a Gemma-4 :func:`gated_mlp_float32_product` as their forward.

    Raises:
        TargetMismatchError: the model has no such module, or it is not the code that this was written for.
    """
    found = next((m for m in model.modules() if MLP in (c.__name__ for c in type(m).__mro__)), None)
    if found is None:
        raise TargetMismatchError(f"{type(model).__name__} has no {MLP}")
    owner = next(c for c in type(found).__mro__ if "forward" in c.__dict__)
    label = f"{owner.__module__}.{owner.__qualname__}"
    require_signature(inspect.unwrap(owner.__dict__["forward"]), SIGNATURE, f"{label}.forward")
    missing = [part for part in ("gate_proj", "up_proj", "down_proj", "act_fn") if not hasattr(found, part)]
    if missing:
        raise TargetMismatchError(f"{label} has no {', '.join(missing)}")
    counters = Counters()

    def forward(self: Any, x: Tensor) -> Tensor:
        return gated_mlp_float32_product(x, self.gate_proj, self.up_proj, self.down_proj, self.act_fn, counters)

    return replace_attribute(owner, "forward", forward, counters)


def _keeping(name: str) -> Callable[[nn.Module, Sequence[str]], Installed]:
    """An ``install`` that keeps what each module of the class ``name`` computes between its projections in float32, its norms with it."""

    def install(model: nn.Module, modules: Sequence[str]) -> Installed:
        kept = {at: module for at, module in model.named_modules() if type(module).__name__ == name}
        if not kept:
            raise TargetMismatchError(f"{type(model).__name__} has no {name}")
        norms = [
            f"{at}.{child}"
            for at, module in kept.items()
            for child, part in module.named_children()
            if "Norm" in type(part).__name__
        ]
        return install_keep_float32(model, [*(f"{at}{OWN}" for at in kept), *norms])

    return install


install_rms_norm_float32 = _keeping("Gemma4RMSNorm")
install_scaled_embedding_float32 = _keeping("Gemma4TextScaledWordEmbedding")
install_attention_float32 = _keeping("Gemma4TextAttention")
