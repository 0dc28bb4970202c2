# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: wave, op: aten.mul.Tensor, phase: forward, step: 1}
# why: the timestep (up to 999) times a scalar frequency of 100 is taken in float16

import torch
from torch import nn


class Wave(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, t):
        speed = torch.logspace(0, -4, self.dim // 2).to(t.dtype)
        angle = (t * 100.0)[:, None] * speed
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


class Denoise(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.wave = Wave(dim)
        self.mix = nn.Sequential(nn.Linear(dim + 8, 64), nn.SiLU(), nn.Linear(64, 8))

    def forward(self, x, t):
        return self.mix(torch.cat([x, self.wave(t)], dim=-1))


torch.manual_seed(0)
model = Denoise().to(torch.float16)
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
clean = torch.randn(64, 8)
for step in range(3):
    t = torch.tensor([999, 800, 700, 100] * 16)
    level = (t / 1000)[:, None]
    noise = torch.randn_like(clean)
    noisy = ((1 - level) * clean + level * noise).half()
    loss = (model(noisy, t.half()).float() - noise).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, f"{loss.item():.3f}")
