# expect: {id: attention-score-overflow, family: nonfinite, raises: null}
# at: {fqn: glance, op: [aten.bmm.default, aten.matmul.default], phase: forward, step: 2}
# shows: "walk 2 nan"
# why: queries and keys of a far place are multiplied in float16 before they are scaled, in inference mode

import torch
from torch import nn


class Glance(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.here, self.there, self.seen = (nn.Linear(size, size) for _ in range(3))

    def forward(self, places):
        near = self.here(places) @ self.there(places).mT
        ahead = torch.ones(near.shape[-2:], dtype=torch.bool).triu(1)
        return (near * 32**-0.5).masked_fill(ahead, -torch.inf).softmax(-1) @ self.seen(places)


class Walker(nn.Module):
    def __init__(self, size=32):
        super().__init__()
        self.glance, self.turn = Glance(size), nn.Linear(size, 4)

    def forward(self, places):
        return self.turn(places + self.glance(places))


torch.manual_seed(41)
walker = Walker()
with torch.no_grad():
    walker.glance.there.weight.copy_(walker.glance.here.weight)
walker = walker.half().eval()
with torch.inference_mode():
    for walk in (1, 2):
        places = torch.randn(2, 6, 32).half() * (1 if walk == 1 else 150)
        print("walk", walk, walker(places).float().sum().item())
