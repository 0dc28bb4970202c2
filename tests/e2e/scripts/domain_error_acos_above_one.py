# expect: {id: domain-error, family: nonfinite, raises: null}
# at: {fqn: bend, op: aten.acos.default, phase: forward, step: 1}
# why: the cosine of parallel vectors is scaled by a learnt factor above one before acos

import torch
from torch import nn


class Bend(nn.Module):
    def __init__(self):
        super().__init__()
        self.stretch = nn.Parameter(torch.tensor(1.05))

    def forward(self, a, b):
        cosine = nn.functional.cosine_similarity(a, b, dim=-1)
        return torch.acos(self.stretch * cosine)


class Arm(nn.Module):
    def __init__(self):
        super().__init__()
        self.bones = nn.Linear(6, 6)
        self.bend = Bend()

    def forward(self, pose):
        upper, lower = self.bones(pose).split(3, dim=-1)
        return self.bend(upper, lower)


torch.manual_seed(0)
arm = Arm()
with torch.no_grad():
    arm.bones.weight.copy_(torch.eye(6))
    arm.bones.bias.zero_()
pose = torch.randn(8, 3).repeat(1, 2)
optimizer = torch.optim.Adam(arm.parameters(), lr=1e-3)
for it in range(2):
    loss = arm(pose).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(it, loss.item())
