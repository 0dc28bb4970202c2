# expect: {id: unsupported-dtype, family: mismatch, raises: NotImplementedError}
# at: {fqn: basis, op: aten.linalg_qr.default, phase: forward, step: 1, raised_in: basis}
# why: the decomposition is written for float32 and float64, and the model is in bfloat16

import torch
from torch import nn


class Basis(nn.Module):
    """Projects on the orthogonal basis of a learned matrix."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.directions = nn.Parameter(torch.randn(width, rank))

    def forward(self, x):
        frame, _ = torch.linalg.qr(self.directions)
        return x @ frame @ frame.T


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.basis = Basis(10, 3)
        self.gain = nn.Linear(10, 10)

    def forward(self, x):
        return self.gain(self.basis(x))


torch.manual_seed(5)
denoiser = Denoiser().bfloat16()
optimizer = torch.optim.AdamW(denoiser.parameters(), lr=1e-2)
for night in range(3):
    sky = torch.randn(16, 10, dtype=torch.bfloat16)
    loss = (denoiser(sky + 0.1 * torch.randn_like(sky)) - sky).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(night, f"loss {loss.item():.3f}")
