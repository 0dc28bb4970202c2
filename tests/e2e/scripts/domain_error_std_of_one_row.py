# expect: {id: domain-error, family: nonfinite, raises: null}
# at: {fqn: whiten, op: aten.std.correction, phase: forward, step: 3}
# why: the last batch of an epoch has one row, whose standard deviation is 0/0

import torch
from torch import nn


class Whiten(nn.Module):
    def forward(self, x):
        return (x - x.mean(0)) / (x.std(0) + 1e-6)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.whiten = Whiten()
        self.net = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, x):
        return self.net(self.whiten(x))


torch.manual_seed(3)
mixer = Mixer()
optimizer = torch.optim.Adam(mixer.parameters(), lr=5e-3)
samples = torch.randn(33, 4) * 3 + 1
for rows in samples.split(16):
    loss = (mixer(rows).squeeze(-1) - rows[:, 0]).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(len(rows), loss.item())
