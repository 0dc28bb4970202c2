# expect: {id: autocast-wrong-device, family: mismatch, raises: RuntimeError}
# at: {fqn: mean, op: aten.addmm.default, phase: forward, step: 1, raised_in: mean}
# why: half features rely on an autocast region that is for "cuda" while everything lives on the CPU

import torch
from torch import nn


class Bikes(nn.Module):
    def __init__(self):
        super().__init__()
        self.week = nn.Embedding(7, 8)
        self.mean = nn.Linear(12, 24)
        self.rate = nn.Linear(24, 1)

    def forward(self, day, weather):
        x = torch.cat([self.week(day).to(weather.dtype), weather], dim=-1)
        return self.rate(torch.relu(self.mean(x))).exp().squeeze(-1)


torch.manual_seed(44)
bikes = Bikes()
opt = torch.optim.Adam(bikes.parameters(), lr=3e-3)
day = torch.randint(0, 7, (64,))
weather = torch.randn(64, 4, dtype=torch.float16)
hired = torch.poisson(torch.full((64,), 3.0))
for it in range(4):
    with torch.autocast("cuda", dtype=torch.float16):
        rate = bikes(day, weather)
        loss = nn.functional.poisson_nll_loss(rate, hired, log_input=False)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, float(loss))
