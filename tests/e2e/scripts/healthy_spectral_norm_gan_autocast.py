# expect: {id: null, family: healthy, raises: null}
# why: a painter and a critic with spectral norm take turns under bfloat16 autocast, a frozen copy follows by moving average

import copy

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

torch.manual_seed(33)
painter = nn.Sequential(nn.Linear(6, 24), nn.LeakyReLU(0.2), nn.Linear(24, 10))
critic = nn.Sequential(spectral_norm(nn.Linear(10, 24)), nn.LeakyReLU(0.2), spectral_norm(nn.Linear(24, 1)))
follower = copy.deepcopy(painter).requires_grad_(False)
brush = torch.optim.Adam(painter.parameters(), lr=2e-3, betas=(0.5, 0.9))
pencil = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))
for canvas in range(6):
    real = torch.randn(32, 10) * 0.5 + 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fake = painter(torch.randn(32, 6))
        verdict = torch.relu(1 - critic(real)).mean() + torch.relu(1 + critic(fake.detach())).mean()
    pencil.zero_grad()
    verdict.backward()
    pencil.step()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        taste = -critic(painter(torch.randn(32, 6))).mean()
    brush.zero_grad()
    taste.backward()
    brush.step()
    with torch.no_grad():
        for slow, fast in zip(follower.parameters(), painter.parameters(), strict=True):
            slow.lerp_(fast, 0.01)
    print(canvas, verdict.item(), taste.item())
