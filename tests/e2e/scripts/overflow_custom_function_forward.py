# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: net.2, op: aten.mul.Tensor, phase: forward, step: 1}
# why: the cube inside a custom autograd function's forward exceeds float16

import torch
from torch import nn


class Swirl(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        cube = x * x * x
        return cube / (1 + cube.abs())

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        slope = 3 * x * x / (1 + (x * x * x).abs()).square()
        return grad * slope


class SwirlLayer(nn.Module):
    def forward(self, x):
        return Swirl.apply(x)


class Surface(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, 40), nn.Linear(40, 40), SwirlLayer(), nn.Linear(40, 40), SwirlLayer(), nn.Linear(40, 1)
        )

    def forward(self, xy):
        return self.net(xy)


torch.manual_seed(0)
surface = Surface().half()
grid = torch.cartesian_prod(torch.linspace(-500, 500, 9), torch.linspace(-500, 500, 9)).half()
height = torch.sin(grid.float().sum(-1, keepdim=True) / 300)
opt = torch.optim.SGD(surface.parameters(), lr=1e-4)
for it in range(2):
    loss = nn.functional.mse_loss(surface(grid).float(), height)
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(it, loss.item())
