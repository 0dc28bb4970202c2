# expect: {id: null, family: healthy, raises: null}
# why: float16 activations of several hundred are squared in float32 inside the norm, and come back

import torch
from torch import nn


class Level(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return (self.gain.float() * wide).to(x.dtype)


class Crane(nn.Module):
    def __init__(self, size=24):
        super().__init__()
        self.arm, self.level, self.hook = nn.Linear(size, size), Level(size), nn.Linear(size, 3)

    def forward(self, load):
        return self.hook(self.level(self.arm(load) * 400))


torch.manual_seed(18)
crane = Crane().half().eval()
with torch.no_grad():
    for shift in range(4):
        print(shift, crane(torch.randn(16, 24).half()).float().std().item())
