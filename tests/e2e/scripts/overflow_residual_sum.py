# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: trunk.4, op: aten.add.Tensor, phase: forward, step: 1}
# why: every branch is in range, the running residual sum is not from the fifth unit on

import torch
from torch import nn


class Unit(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.lin = nn.Linear(dim, dim, bias=False)
        nn.init.eye_(self.lin.weight)

    def forward(self, x):
        return x + 9000 * self.lin(self.norm(x)).clamp(-1, 1.5)


class Regress(nn.Module):
    def __init__(self, dim=16, depth=8):
        super().__init__()
        self.into = nn.Linear(dim, dim)
        self.trunk = nn.Sequential(*[Unit(dim) for _ in range(depth)])
        self.last = nn.LayerNorm(dim)
        self.value = nn.Linear(dim, 1)

    def forward(self, x):
        return self.value(self.last(self.trunk(self.into(x))))


torch.manual_seed(0)
regress = Regress().to(torch.float16).eval()
with torch.no_grad():
    table = torch.randn(32, 16, dtype=torch.float16)
    values = regress(table)
print("mean value", values.float().mean().item())
