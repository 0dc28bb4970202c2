# expect: {id: norm-square-overflow, family: nonfinite, raises: null}
# at: {fqn: fix, op: aten.mul.Tensor, phase: forward, step: 1}
# why: a hand-written instance norm takes the square of centred float16 feature maps

import torch
from torch import nn


class Adjust(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels, 1, 1))
        self.shift = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x):
        centred = x - x.mean(dim=(2, 3), keepdim=True)
        energy = (centred * centred).mean(dim=(2, 3), keepdim=True)
        return self.scale * centred / (energy + 1e-5).sqrt() + self.shift


class Painter(nn.Module):
    def __init__(self):
        super().__init__()
        self.brush = nn.Conv2d(3, 6, 3)
        self.fix = Adjust(6)
        self.out = nn.Conv2d(6, 3, 1)

    def forward(self, picture):
        return self.out(torch.relu(self.fix(self.brush(picture))))


torch.manual_seed(7)
painter = Painter().half()
opt = torch.optim.SGD(painter.parameters(), lr=1e-3)
for step in range(2):
    picture = (torch.rand(2, 3, 20, 20) * 2000).half()
    target = torch.rand(2, 3, 18, 18)
    loss = nn.functional.mse_loss(painter(picture).float(), target)
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
