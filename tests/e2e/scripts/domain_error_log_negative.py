# expect: {id: domain-error, family: nonfinite, raises: null}
# at: {fqn: depth, op: aten.log.default, phase: forward, step: 1}
# why: the logarithm of a number that can be negative, in float32

import torch
from torch import nn


class LogDepth(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.far = nn.Linear(dim, 1)

    def forward(self, x):
        return torch.log(self.far(x))


class Lens(nn.Module):
    def __init__(self):
        super().__init__()
        self.see = nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16))
        self.depth = LogDepth(16)

    def forward(self, image):
        return self.depth(self.see(image))


torch.manual_seed(0)
lens = Lens()
opt = torch.optim.SGD(lens.parameters(), lr=0.01)
for it in range(2):
    image, metres = torch.rand(6, 3, 16, 16), torch.rand(6, 1) * 10 + 0.5
    loss = nn.functional.mse_loss(lens(image), metres.log())
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, loss.item())
