# expect: {id: null, family: healthy, raises: null}
# why: training for int8 rounds activations itself, stores them as int8 and scales them back, as it means to

import torch
from torch import nn


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, step):
        return (x / step).round().clamp(-128, 127).to(torch.int8).to(x.dtype) * step

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Stage(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.enter, self.leave = nn.Linear(size, 32), nn.Linear(32, 3)
        self.register_buffer("step", torch.tensor(0.05))

    def forward(self, scene):
        return self.leave(Rounded.apply(torch.relu(self.enter(scene)), self.step))


torch.manual_seed(15)
stage = Stage()
optimizer = torch.optim.Adam(stage.parameters(), lr=2e-3)
for evening in range(6):
    scene = torch.randn(20, 16)
    loss = nn.functional.mse_loss(stage(scene), scene[:, :3])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(evening, loss.item())
