# expect: {id: null, family: healthy, raises: SystemExit}
# why: two optimizers, a gradient penalty through a double backward, and sys.exit(0) at the end

import sys

import torch
from torch import nn

torch.manual_seed(23)
forge = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 6))
judge = nn.Sequential(nn.Linear(6, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
opt_forge = torch.optim.Adam(forge.parameters(), lr=1e-3, betas=(0.5, 0.9))
opt_judge = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.9))


def penalty(real, fake):
    share = torch.rand(len(real), 1)
    mid = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(judge(mid).sum(), mid, create_graph=True)
    return (slope.norm(dim=-1) - 1).square().mean()


for step in range(4):
    real = torch.randn(32, 6).cumsum(-1)
    fake = forge(torch.randn(32, 4))
    loss_judge = judge(fake.detach()).mean() - judge(real).mean() + 10 * penalty(real, fake.detach())
    opt_judge.zero_grad()
    loss_judge.backward()
    opt_judge.step()
    loss_forge = -judge(fake).mean()
    opt_forge.zero_grad()
    loss_forge.backward()
    opt_forge.step()
    print(step, loss_judge.item(), loss_forge.item())
sys.exit(0)
