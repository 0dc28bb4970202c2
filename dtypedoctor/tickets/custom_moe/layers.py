"""The layers of the custom decoder: RMSNorm, low-rank updates, attention with sinks, a mixture of experts, a plain gated MLP.

The correction at the end casts the input of the low-rank updates.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from dtypedoctor.corrections.contract import (
    Counters,
    Forward,
    Installed,
    TargetMismatchError,
    named_modules_of,
    wrap_forwards,
)


def normalize(x: Tensor, eps: float) -> Tensor:
    """``x`` divided by its root mean square over the last dimension.

    Args:
        x: (..., hidden), any floating dtype.
        eps: added to the mean square.

    Returns:
        (..., hidden) in float32.
    """
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class PromotingRMSNorm(nn.Module):
    """Returns ``weight * normalized.to(x.dtype)``: type promotion gives the output the wider of the two dtypes.

    Args:
        hidden: size of the last dimension.
        eps: added to the mean square.
    """

    def __init__(self, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to (..., hidden), in ``torch.promote_types(weight.dtype, x.dtype)``."""
        return self.weight * normalize(x, self.eps).to(x.dtype)


class CastingRMSNorm(PromotingRMSNorm):
    """The correction: the same product, cast back to the dtype of the input.

    In a 16-bit dtype of epsilon ``e`` the output is rounded twice, so it differs from float32's by at most ``e`` relatively.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to (..., hidden), in ``x.dtype``."""
        return super().forward(x).to(x.dtype)


class LinearLoRA(nn.Module):
    """Adds a trainable update of rank ``rank`` to a frozen linear layer; no cast anywhere.

    Args:
        base: the layer to adapt, ``nn.Linear`` or a layer of the same interface; it is frozen.
        rank: inner dimension of the update.
        alpha: the update is scaled by ``alpha / rank``.
        dtype: dtype of the update's weights.
    """

    def __init__(self, base: nn.Linear, rank: int, *, alpha: float = 16.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        device = base.weight.device
        self.lora_a = nn.Linear(base.in_features, rank, bias=False, device=device, dtype=dtype)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False, device=device, dtype=dtype)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features).

        Raises:
            RuntimeError: ``x`` has another dtype than a dense weight it meets, and no autocast region covers the call.
        """
        return self.base(x) + self.lora_b(self.lora_a(x) * self.scale)


ROTARY_BASE = 10000.0
GATE_LIMIT = 7.0
GATE_SLOPE = 1.702


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864), halves rotated against each other.

    Args:
        x: (batch, heads, tokens, head_dim); position t is index t of the tokens.

    Returns:
        Same shape and dtype; the angles are computed in float32.
    """
    half = x.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
    angles = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal attention whose softmax has one more, learned logit per head, so a row of weights may sum to less than one.

    Args:
        hidden: size of the hidden states.
        heads: number of query heads.
        kv_heads: number of key and value heads; divides ``heads``.
        head_dim: dimension of a head.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.groups = heads // kv_heads
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        """Attends.

        Args:
            x: (batch, tokens, hidden).
            allowed: bool, (batch, 1, tokens, tokens); True where the query of a row may see the key of a column.

        Returns:
            (batch, tokens, hidden); scores are normalized in float32 and cast to the dtype of the values.
        """
        query = rotate(self._heads(self.q_proj(x)))
        key = rotate(self._heads(self.k_proj(x))).repeat_interleave(self.groups, dim=1)
        value = self._heads(self.v_proj(x)).repeat_interleave(self.groups, dim=1)
        scores = (query @ key.transpose(-1, -2) * self.head_dim**-0.5).float().masked_fill(~allowed, float("-inf"))
        sinks = self.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
        mixed = weights.to(value.dtype) @ value
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MixtureOfExperts(nn.Module):
    """Each token's output is the weighted sum of its ``top_k`` experts, chosen by a linear router.

    All experts compute all tokens and the others get weight zero: no token is moved, so every op is a dense product.

    Args:
        hidden: size of the hidden states.
        intermediate: inner size of an expert.
        experts: number of experts.
        top_k: experts per token.
    """

    def __init__(self, hidden: int, intermediate: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(experts, hidden, 2 * intermediate) * hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(experts, intermediate, hidden) * intermediate**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, hidden) to (batch, tokens, hidden); routing weights are normalized in float32."""
        flat = x.flatten(0, 1)
        best, chosen = self.router(flat).topk(self.top_k, dim=-1)
        weights = best.softmax(-1, dtype=torch.float32).to(x.dtype)
        shares = torch.zeros(len(flat), len(self.down_proj), dtype=x.dtype, device=x.device).scatter(
            -1, chosen, weights
        )
        gate, up = (flat @ self.gate_up_proj).chunk(2, dim=-1)
        outputs = clamped_gate(gate, up) @ self.down_proj
        return (outputs * shares.t()[..., None]).sum(0).unflatten(0, x.shape[:2])


def clamped_gate(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's activation: ``gate * sigmoid(1.702 * gate) * (up + 1)`` with gate <= 7 and -7 <= up <= 7."""
    gate = gate.clamp(max=GATE_LIMIT)
    up = up.clamp(-GATE_LIMIT, GATE_LIMIT)
    return gate * torch.sigmoid(GATE_SLOPE * gate) * (up + 1)


class DenseMlp(nn.Module):
    """A gated MLP: ``down(silu(gate(x)) * up(x))``.

    Args:
        hidden: size of the hidden states.
        intermediate: inner size.
    """

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) to (..., hidden)."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def install_cast_at_lora_input(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Casts the input of low-rank adapted linear layers to the dtype of their update; a guard, not a cure of the cause.

    Args:
        model: a model with :class:`LinearLoRA` layers.
        modules: dotted names of the layers that are meant; all if empty.

    Raises:
        TargetMismatchError: the model has no such layer, or a named module is not one.
    """
    if modules:
        targets = named_modules_of(model, list(modules))
        others = [name for name, module in targets.items() if not isinstance(module, LinearLoRA)]
        if others:
            raise TargetMismatchError(f"{', '.join(others)} is not a LinearLoRA")
    else:
        targets = {name: module for name, module in model.named_modules() if isinstance(module, LinearLoRA)}
        if not targets:
            raise TargetMismatchError(f"{type(model).__name__} has no LinearLoRA")
    counters = Counters()
    return wrap_forwards(targets, _casting_input(counters), counters)


def _casting_input(counters: Counters) -> Callable[[nn.Module, Forward], Forward]:
    def wrap(module: nn.Module, original: Forward) -> Forward:
        assert isinstance(module, LinearLoRA)  # the targets were chosen so
        wanted = module.lora_a.weight

        def forward(x: Tensor) -> Tensor:
            if x.dtype != wanted.dtype:
                counters.hit()
            cast: Tensor = original(x.to(wanted.dtype))
            return cast

        return forward

    return wrap
