# expect: {id: backward-overflow, family: nonfinite, raises: null}
# at: {fqn: sharp, op: aten.mul.Tensor, phase: backward, step: 1}
# why: a hand-written backward multiplies the gradient by a steep float16 slope

import torch
from torch import nn


class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x)
        ctx.slope = slope
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * ctx.slope * (s * (1 - s)), None


class Sharp(nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope = slope

    def forward(self, x):
        return Step.apply(x, self.slope)


class Edges(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow = nn.Conv2d(1, 4, 3, padding=1)
        self.sharp = Sharp(slope=20000.0)
        self.join = nn.Conv2d(4, 1, 1)

    def forward(self, x):
        return self.join(self.sharp(self.grow(x)))


torch.manual_seed(1)
edges = Edges().half()
optimizer = torch.optim.SGD(edges.parameters(), lr=1e-5)
for it in range(2):
    picture = torch.rand(1, 1, 12, 12).half()
    loss = (edges(picture).float() - picture.float()).abs().sum() * 16
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(it, loss.item())
