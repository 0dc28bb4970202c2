# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: pooled, op: aten.sum.dim_IntList, phase: forward, step: 1}
# why: a sum over 4096 positions in float16 instead of a mean

import torch
from torch import nn


class SumPool(nn.Module):
    def forward(self, maps):
        return maps.sum(dim=(2, 3))


class Slices(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.pooled = SumPool()
        self.decide = nn.Linear(4, 2)

    def forward(self, x):
        return self.decide(self.pooled(torch.relu(self.conv(x) * 8)))


def train(model, steps):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for step in range(steps):
        scan, grade = 6 * torch.rand(2, 1, 64, 64), torch.tensor([0, 1])
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(scan), grade)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"[{step}] {loss.item()}")


torch.manual_seed(2)
slices = Slices()
nn.init.constant_(slices.conv.bias, 3.0)
train(slices, 2)
