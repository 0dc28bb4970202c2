# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: scan, op: aten.exp.default, phase: forward, step: 1}
# why: the scan divides by a decay product taken through exp of a cumulative sum, whose inverse exceeds float16

import torch
from torch import nn


class Scan(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.rate = nn.Linear(dim, dim)
        self.skip = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        decay = nn.functional.logsigmoid(self.rate(x)).cumsum(1)
        grown = (x * (-decay).exp()).cumsum(1)
        return decay.exp() * grown + self.skip * x


class Delta(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.into = nn.Linear(3, dim)
        self.scan = Scan(dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, series):
        return self.out(self.scan(self.into(series)))[:, -1]


torch.manual_seed(0)
delta = Delta().to(torch.float16)
optimizer = torch.optim.SGD(delta.parameters(), lr=1e-2)
for year in range(2):
    series, flow = torch.randn(4, 64, 3).half(), torch.randn(4, 1)
    loss = nn.functional.l1_loss(delta(series).float(), flow)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(year, loss.item())
