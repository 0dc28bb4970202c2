"""A linear layer with a low-rank update that trusts the dtype of its input, and one that does not.

``y = base(x) + scale * B(A(x))`` (LoRA, https://arxiv.org/abs/2106.09685). A float32 input meets bfloat16 weights in the
first matrix product that does not cast: in ``base`` where that is dense, in ``lora_a`` where ``base`` is bitsandbytes'
4-bit layer, which casts its input to its compute dtype and returns the dtype it was given
(public description: https://github.com/NVIDIA-NeMo/Automodel/pull/1622).
"""

import torch
from torch import Tensor, nn


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


class CastingLinearLoRA(LinearLoRA):
    """The defensive correction: casts the input to the dtype of the update's weights.

    It protects this layer only. Whoever widened the input still did, and every other consumer of it still gets it.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features), in the dtype of ``lora_a``'s weight."""
        return super().forward(x.to(self.lora_a.weight.dtype))
