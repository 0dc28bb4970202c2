# expect: {id: null, family: healthy, raises: null}
# why: inf as the start of a running minimum, in a buffer and in a local tensor

import torch
from torch import nn


class Range(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("low", torch.full((dim,), float("inf")))
        self.register_buffer("high", torch.full((dim,), float("-inf")))

    def forward(self, x):
        if self.training:
            self.low.copy_(torch.minimum(self.low, x.detach().amin(0)))
            self.high.copy_(torch.maximum(self.high, x.detach().amax(0)))
        return (x - self.low) / (self.high - self.low).clamp_min(1e-6)


def nearest(points, shops):
    best = torch.full((len(points),), torch.inf)
    which = torch.zeros(len(points), dtype=torch.long)
    for number, shop in enumerate(shops):
        far = (points - shop).norm(dim=-1)
        which = torch.where(far < best, number, which)
        best = torch.minimum(best, far)
    return which


torch.manual_seed(5)
shops = torch.rand(4, 2)
net = nn.Sequential(Range(2), nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for day in range(8):
    people = torch.rand(64, 2)
    loss = nn.functional.cross_entropy(net(people), nearest(people, shops))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(day, loss.item())
