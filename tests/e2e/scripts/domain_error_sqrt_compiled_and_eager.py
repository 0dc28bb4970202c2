# expect: {id: domain-error, family: compile-load, raises: null}
# at: {fqn: [swell, ''], op: aten.sqrt.default, phase: forward, step: 2}
# shows: "hour 2 nan"
# why: the root of a negative number is NaN compiled and in eager mode alike, so the compiler is not to blame

import torch
from torch import nn


class Swell(nn.Module):
    def forward(self, height, trough):
        return torch.sqrt(height - trough)


class Tide(nn.Module):
    def __init__(self):
        super().__init__()
        self.swell = Swell()
        self.out = nn.Linear(6, 2)

    def forward(self, height, trough):
        return self.out(self.swell(height, trough))


torch.manual_seed(3)
tide = torch.compile(Tide(), backend="eager")
for hour in range(1, 4):
    height = torch.rand(5, 6) + 1
    trough = height + 0.5 if hour == 2 else height - 0.5
    with torch.no_grad():
        print("hour", hour, tide(height, trough).sum().item())
