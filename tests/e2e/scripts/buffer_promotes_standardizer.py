# expect: {id: buffer-promotes-to-float32, family: mismatch, raises: RuntimeError}
# at: {fqn: prep, op: aten.addmm.default, phase: forward, step: 1, raised_in: body.0}
# born: buffer
# born_fqn: prep
# why: only parameters were cast, so the standardiser's float32 buffers lift the bfloat16 readings

import torch
from torch import nn


class Standardise(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.register_buffer("centre", torch.zeros(channels))
        self.register_buffer("spread", torch.ones(channels))

    def fit(self, table):
        self.centre.copy_(table.mean(0))
        self.spread.copy_(table.std(0))
        return self

    def forward(self, x):
        return (x - self.centre) / self.spread


class Turbine(nn.Module):
    def __init__(self, channels=6):
        super().__init__()
        self.prep = Standardise(channels)
        self.body = nn.Sequential(nn.Linear(channels, 48), nn.GELU(), nn.Linear(48, 1))

    def forward(self, x):
        return self.body(self.prep(x)).squeeze(-1)


torch.manual_seed(7)
history = torch.randn(256, 6) * 3 + 10
model = Turbine()
model.prep.fit(history)
for p in model.parameters():
    p.data = p.data.to(torch.bfloat16)

power = model(history[:32].to(torch.bfloat16))
print("predicted power", power.float().mean().item())
