"""Gemma's norm and scaled embedding with every intermediate in float32, held within float16's range.

Public description of both, as parts of a larger fix: https://github.com/unslothai/unsloth-zoo/pull/600
"""

import torch
from torch import Tensor

from dtypedoctor.corrections.counters import Counters
from dtypedoctor.tickets.gemma4.mlp import SAFE_LIMIT


def held(x: Tensor, dtype: torch.dtype, counters: Counters) -> Tensor:
    """A float32 tensor of any shape in ``dtype``; for float16 within ±65280, the elements that this changes counted as ``clamped``."""
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
