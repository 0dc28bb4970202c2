# expect: {id: domain-error, family: nonfinite, raises: null}
# at: {fqn: '', op: aten.exp.default, phase: forward, step: 1}
# why: exp of several hundred is inf in float32 too, under bfloat16 autocast or not

import torch
from torch import nn


class Growth(nn.Module):
    def __init__(self):
        super().__init__()
        self.speed = nn.Linear(2, 1)

    def forward(self, days, conditions):
        return torch.exp(self.speed(conditions) * days)


torch.manual_seed(0)
growth = Growth()
nn.init.constant_(growth.speed.bias, 1.0)
opt = torch.optim.SGD(growth.parameters(), lr=1e-6)
for step in range(2):
    days = torch.linspace(0, 400, 20)[:, None]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        size = growth(days, torch.rand(20, 2))
    loss = (size.float().log1p() - days / 50).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
