# expect: {id: compile-only-nonfinite, family: compile-load, raises: null}
# at: {fqn: ['', spread], phase: compile, step: 2}
# shows: "night 2 nan"
# why: eager mode rounds a product to one and takes the root of 0, the compiled kernel keeps float32 and takes that of a negative number

import torch
from torch import nn


def fuse(graph, inputs):
    def kernel(*args):
        wide = [a.float() if a.is_floating_point() else a for a in args]
        return tuple(r.to(torch.bfloat16) for r in graph.forward(*wide))

    return kernel


class Spread(nn.Module):
    def forward(self, high, low):
        return torch.sqrt(high * low - 1)


class Sky(nn.Module):
    def __init__(self):
        super().__init__()
        self.spread = Spread()
        self.out = nn.Linear(4, 1)

    def forward(self, high, low):
        return self.out(self.spread(high, low))


torch.manual_seed(0)
sky = torch.compile(Sky().to(torch.bfloat16), backend=fuse)
for night in range(1, 4):
    edge = 2.0**-7 if night == 2 else 0.0
    high = torch.full((2, 4), 1 + edge, dtype=torch.bfloat16)
    low = torch.full((2, 4), 1 - edge, dtype=torch.bfloat16)
    with torch.no_grad():
        print("night", night, sky(high, low).float().sum().item())
