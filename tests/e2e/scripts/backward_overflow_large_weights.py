# expect: {id: backward-overflow, family: nonfinite, raises: null}
# at: {fqn: '4', op: aten.mm.default, phase: backward, step: 1}
# why: forward peaks at a few hundred; the gradients through large float16 weights leave the range at any loss scale

import torch
from torch import nn

torch.manual_seed(0)
gauge = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 1))
with torch.no_grad():
    gauge[0].weight.mul_(1e-3)
    gauge[0].bias.zero_()
    gauge[2].weight.mul_(300)
    gauge[4].weight.mul_(3000)
gauge.half()
optimizer = torch.optim.SGD(gauge.parameters(), lr=1e-6)
for step in range(2):
    pressure, mm = torch.randn(64, 8).half(), torch.rand(64, 1) * 50
    loss = (gauge(pressure).float() - mm).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.1f}")
