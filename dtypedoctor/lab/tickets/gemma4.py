"""A tiny Gemma-4, from transformers' own code, and corrections of such models: MLP product, RMSNorm, embedding, attention in float32."""

import inspect
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Gemma4ForCausalLM, Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextAttention

from dtypedoctor.corrections.contract import (
    Counters,
    Installed,
    TargetMismatchError,
    replace_attribute,
    require_signature,
)
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


def held(x: Tensor, dtype: torch.dtype, counters: Counters) -> Tensor:
    """A float32 tensor of any shape in ``dtype``; for float16 clamped to ±65,280, the elements that this changes counted as ``clamped``."""
    if dtype is torch.float16:
        counters.add("clamped", x.abs() > SAFE_LIMIT)
        x = x.clamp(-SAFE_LIMIT, SAFE_LIMIT)
    return x.to(dtype)


def rms_norm_float32(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of ``x`` over the last dimension, scaled by ``weight`` where there is one.

    Args:
        x: (..., hidden), any floating dtype.
        weight: (hidden,).
        eps: added to the mean square.

    Returns:
        (..., hidden) in float32.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight.float()


def scaled_embedding_float32(
    tokens: Tensor, weight: Tensor, scale: Tensor, padding: int | None, counters: Counters
) -> Tensor:
    """Looks up token ids (...) in ``weight`` (vocabulary, hidden) and multiplies by ``scale`` (a scalar) in float32.

    The row of the token ``padding`` gets no gradient, as in ``torch.nn.Embedding``.

    Returns:
        (..., hidden) in the dtype of ``weight``.
    """
    counters.hit()
    wide = torch.nn.functional.embedding(tokens, weight, padding).float() * scale.float()
    return held(wide, weight.dtype, counters)


def attention_float32(
    layer: Any,
    x: Tensor,
    rotation: tuple[Tensor, Tensor],
    mask: Tensor | None,
    shared: MutableMapping[str, tuple[Tensor, Tensor]],
    cache: Any,
    counters: Counters,
) -> Tensor:  # fmt: skip
    """The output of one attention layer.

    Keys and values are cached and shared in the dtype of ``x``, as other layers and later calls expect them. What enters the
    output projection is clamped to ±65,280 (``clamped``); elements of its result that are not finite become zero, so that
    the residual passes unchanged (``rescued``).

    Args:
        layer: a ``Gemma4TextAttention``: projections, norms, ``head_dim``, ``scaling`` and its place among the layers.
        x: (batch, tokens, hidden).
        rotation: cosine and sine, each (batch, tokens, head_dim).
        mask: added to the scores, or boolean (True is attended); None is causal where the layer is.
        shared: keys and values by layer type, filled by the layers that others take them from.
        cache: key-value cache or None.

    Returns:
        (batch, tokens, hidden) in the dtype of the output projection.
    """
    counters.hit()
    query = _rotated(_normed(layer.q_proj(x), layer.q_norm, layer.head_dim), rotation).transpose(1, 2)
    if layer.is_kv_shared_layer:
        key, value = shared[layer.layer_type]
    else:
        key, value = _keys_and_values(layer, x, rotation, counters)
        if cache is not None:
            key, value = cache.update(key, value, layer.layer_idx)
    if layer.store_full_length_kv:
        shared[layer.layer_type] = key, value
    # scaled dot-product attention in float32: (batch, heads, tokens, head_dim)
    if mask is not None and mask.is_floating_point():
        mask = mask.float()
    mixed = functional.scaled_dot_product_attention(
        query,
        key.float().repeat_interleave(layer.num_key_value_groups, dim=1),
        value.float().repeat_interleave(layer.num_key_value_groups, dim=1),
        attn_mask=mask,
        dropout_p=layer.attention_dropout if layer.training else 0.0,
        is_causal=mask is None and layer.is_causal and query.shape[2] > 1,
        scale=layer.scaling,
    )
    mixed = mixed.transpose(1, 2).reshape(*x.shape[:-1], -1)
    out = layer.o_proj(held(mixed, x.dtype, counters))
    counters.add("rescued", ~torch.isfinite(out))
    return torch.nan_to_num(out, nan=0.0, posinf=0.0, neginf=0.0)


def _keys_and_values(
    layer: Any, x: Tensor, rotation: tuple[Tensor, Tensor], counters: Counters
) -> tuple[Tensor, Tensor]:
    projected = layer.k_proj(x)
    key = _rotated(_normed(projected, layer.k_norm, layer.head_dim), rotation)
    value = _normed(projected if layer.v_proj is None else layer.v_proj(x), layer.v_norm, layer.head_dim)
    return held(key, x.dtype, counters).transpose(1, 2), held(value, x.dtype, counters).transpose(1, 2)


def _normed(projected: Tensor, norm: Any, head_dim: int) -> Tensor:
    """(batch, tokens, heads * head_dim) to (batch, tokens, heads, head_dim) in float32."""
    heads = projected.view(*projected.shape[:-1], -1, head_dim)
    return rms_norm_float32(heads, norm.weight if norm.with_scale else None, norm.eps)


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of (batch, tokens, heads, head_dim): halves of the last dimension turn into each other."""
    cosine, sine = (part.float().unsqueeze(2) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The class that a correction was written for.

    Attributes:
        name: class name in transformers.
        signature: parameter names of its forward.
        parts: attributes that the correction reads.
    """

    name: str
    signature: tuple[str, ...]
    parts: tuple[str, ...]

    def owner(self, model: nn.Module) -> type:
        """The class whose forward the modules of ``model`` run.

        Raises:
            TargetMismatchError: the model has no such module, or it is not the code that this was written for.
        """
        found = next((m for m in model.modules() if self.name in (c.__name__ for c in type(m).__mro__)), None)
        if found is None:
            raise TargetMismatchError(f"{type(model).__name__} has no {self.name}")
        owner = next(c for c in type(found).__mro__ if "forward" in c.__dict__)
        label = f"{owner.__module__}.{owner.__qualname__}"
        require_signature(inspect.unwrap(owner.__dict__["forward"]), self.signature, f"{label}.forward")
        missing = [part for part in self.parts if not hasattr(found, part)]
        if missing:
            raise TargetMismatchError(f"{label} has no {', '.join(missing)}")
        return owner


def _replacing(
    target: _Target, corrected: Callable[[Forward, Counters], Forward]
) -> Callable[[nn.Module, Sequence[str]], Installed]:
    """An ``install`` that gives every instance of the class ``corrected(original forward, counters)`` as its forward."""

    def install(model: nn.Module, modules: Sequence[str]) -> Installed:
        owner = target.owner(model)
        counters = Counters()
        return replace_attribute(owner, "forward", corrected(owner.__dict__["forward"], counters), counters)

    return install


def _mlp(original: Forward, counters: Counters) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        return gated_mlp_float32_product(x, self.gate_proj, self.up_proj, self.down_proj, self.act_fn, counters)

    return forward


def _rms_norm(original: Forward, counters: Counters) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        counters.hit()
        normed = rms_norm_float32(hidden_states, self.weight if self.with_scale else None, self.eps)
        return held(normed, hidden_states.dtype, counters)

    return forward


def _embedding(original: Forward, counters: Counters) -> Forward:
    def forward(self: Any, input_ids: Tensor) -> Tensor:
        return scaled_embedding_float32(input_ids, self.weight, self.embed_scale, self.padding_idx, counters)

    return forward


CACHE = "cache" if "cache" in inspect.signature(Gemma4TextAttention.forward).parameters else "past_key_values"
"""What attention calls the KV cache: ``cache`` since transformers 5.24."""


def _attention(original: Forward, counters: Counters) -> Forward:
    def forward(self: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Tensor | None,
                shared_kv_states: Any, cache: Any = None, past_key_values: Any = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        cache = past_key_values if cache is None else cache
        if hidden_states.dtype is not torch.float16:
            return original(self, hidden_states, position_embeddings, attention_mask, shared_kv_states, cache, **kwargs)
        out = attention_float32(
            self, hidden_states, position_embeddings, attention_mask, shared_kv_states, cache, counters
        )
        return out, None

    return forward


install_mlp_float32_product = _replacing(
    _Target(name="Gemma4TextMLP", signature=("self", "x"), parts=("gate_proj", "up_proj", "down_proj", "act_fn")),
    _mlp,
)

install_rms_norm_float32 = _replacing(
    _Target(name="Gemma4RMSNorm", signature=("self", "hidden_states"), parts=("with_scale", "eps")), _rms_norm
)

install_scaled_embedding_float32 = _replacing(
    _Target(
        name="Gemma4TextScaledWordEmbedding",
        signature=("self", "input_ids"),
        parts=("weight", "embed_scale", "padding_idx"),
    ),
    _embedding,
)

install_attention_float32 = _replacing(
    _Target(
        name="Gemma4TextAttention",
        signature=(
            "self",
            "hidden_states",
            "position_embeddings",
            "attention_mask",
            "shared_kv_states",
            CACHE,
            "kwargs",
        ),
        parts=("q_proj", "q_norm", "o_proj", "head_dim", "scaling", "is_kv_shared_layer", "store_full_length_kv"),
    ),
    _attention,
)
