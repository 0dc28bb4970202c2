"""RMSNorm whose output follows its weight's dtype, and RMSNorm whose output follows its input's dtype.

``y = w * x / sqrt(mean(x²) + eps)`` over the last dimension (Zhang and Sennrich, https://arxiv.org/abs/1910.07467). Both
forms normalise in float32. They differ in their output contract, and only where weight and input differ in dtype: a
float32 weight, kept for accuracy in a bfloat16 model, makes the first form return float32
(public description: https://github.com/NVIDIA-NeMo/Automodel/pull/1622).
"""

import torch
from torch import Tensor, nn


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
