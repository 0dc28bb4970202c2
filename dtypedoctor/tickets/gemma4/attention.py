"""Gemma-4's attention with norms, rotation and softmax in float32 between its projections.

Public description, as part of a larger fix: https://github.com/unslothai/unsloth-zoo/pull/600
"""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dtypedoctor.corrections.counters import Counters
from dtypedoctor.tickets.gemma4.float32 import held, rms_norm_float32


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
    output projection is held within ±65280 (``clamped``); elements of its result that are not finite become zero, so that
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
    mixed = _mixed(layer, query, key, value, mask)
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


def _mixed(layer: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled dot-product attention in float32: (batch, heads, tokens, head_dim)."""
    if mask is not None and mask.is_floating_point():
        mask = mask.float()
    return functional.scaled_dot_product_attention(
        query,
        key.float().repeat_interleave(layer.num_key_value_groups, dim=1),
        value.float().repeat_interleave(layer.num_key_value_groups, dim=1),
        attn_mask=mask,
        dropout_p=layer.attention_dropout if layer.training else 0.0,
        is_causal=mask is None and layer.is_causal and query.shape[2] > 1,
        scale=layer.scaling,
    )
