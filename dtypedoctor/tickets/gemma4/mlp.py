"""Gemma's gated MLP: as transformers computes it, and so that its product cannot leave float16's range.

In float16 ``act(gate) * up`` exceeds 65504 for inputs that bfloat16 and float32 carry easily
(public description: https://github.com/unslothai/unsloth-zoo/pull/600).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from dtypedoctor.corrections.counters import Counters

SAFE_LIMIT = 65280.0
"""The largest value that float16 and bfloat16 both represent exactly; 65504 would round up to 65536 in bfloat16."""

Layer = Callable[[Tensor], Tensor]


def gated_mlp(x: Tensor, gate_proj: Layer, up_proj: Layer, down_proj: Layer, activation: Layer) -> Tensor:
    """The original: every intermediate in the dtype of the projections.

    Args:
        x: hidden states, (..., hidden).
        gate_proj, up_proj: (..., hidden) to (..., intermediate).
        down_proj: (..., intermediate) to (..., hidden).
        activation: elementwise, applied to the gate.

    Returns:
        (..., hidden) in the dtype of ``down_proj``'s output.
    """
    return down_proj(activation(gate_proj(x)) * up_proj(x))


def gated_mlp_float32_product(
    x: Tensor, gate_proj: Layer, up_proj: Layer, down_proj: Layer, activation: Layer, counters: Counters
) -> Tensor:
    """The correction: product in float32, held within ±65280, cast back before ``down_proj``.

    Where the gate is not float16 the original formula runs, bit for bit. Elements that the limit changes are counted as
    ``clamped``. ``down_proj`` may still give NaN or inf (one NaN in a row of the product spoils the whole row of the
    result, its own accumulation may overflow); such elements are set to zero, so that the residual passes unchanged, and
    counted as ``rescued``: a run with many of them trains without this MLP.

    Args and return value are those of :func:`gated_mlp`.
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
