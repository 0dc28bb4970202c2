# expect: {id: custom-function-autocast, family: mismatch, raises: AttributeError}
# at: {fqn: null, phase: backward, step: 1}
# born: custom-fwd
# why: custom_fwd writes to the context that a forward without ctx does not have, and custom_bwd looks for it there

import torch
from torch import nn


class Stretch(torch.autograd.Function):
    @staticmethod
    def forward(x, factor):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, factor = ctx.saved_tensors
        return grad * factor, (grad * x).sum()


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return Stretch.apply(x, self.factor)


class Map(nn.Module):
    def __init__(self):
        super().__init__()
        self.draw, self.scale, self.read = nn.Linear(7, 16), Scale(), nn.Linear(16, 1)

    def forward(self, x):
        return self.read(self.scale(self.draw(x)))


torch.manual_seed(11)
chart = Map()
optimizer = torch.optim.SGD(chart.parameters(), lr=0.01)
for _sheet in range(3):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chart(torch.randn(8, 7)).float().square().mean()
    loss.backward()
    optimizer.step()
