# expect: {id: divergence, family: nonfinite, raises: null}
# at: {fqn: '2', op: aten.addmm.default, phase: forward, step: 4}
# shows: nan|inf
# why: a learning rate of 30 multiplies weights and loss in each step; float16 ends first, and float32 follows two steps later

import torch
from torch import nn

torch.manual_seed(0)
gauge = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
opt = torch.optim.SGD(gauge.parameters(), lr=30.0)
hours, levels = torch.randn(256, 16), torch.randn(256, 10)
for step in range(6):
    with torch.autocast("cpu", dtype=torch.float16):
        rebuilt = gauge(hours)
    loss = (rebuilt.float() - levels).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, round(loss.item(), 3) if loss.isfinite() else loss.item())
