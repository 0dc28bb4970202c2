# expect: {id: backward-overflow, family: scaling, raises: RuntimeError}
# at: {fqn: '', op: aten.mul.Tensor, phase: backward, step: 1}
# why: a slope of a thousand in the forward overflows the gradient at every scale, until a scaler of one's own gives up

import torch
from torch import nn

torch.manual_seed(0)


class DynamicScaler:
    """Halves its scale down to 1, as DeepSpeed's does."""

    def __init__(self, scale):
        self.scale = scale

    def shrink(self):
        if self.scale <= 1:
            raise RuntimeError("Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")
        self.scale /= 2


class Amplifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.last = nn.Linear(16, 1)
        with torch.no_grad():
            self.first.weight.mul_(1e-3)
            self.first.bias.zero_()
            self.last.weight.mul_(200)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) * 1000.0))


amplifier = Amplifier().half()
parameters = list(amplifier.parameters())
optimizer = torch.optim.SGD(parameters, lr=1e-4)
scaler = DynamicScaler(16.0)

for _ in range(8):
    x = torch.randn(8, 4).half()
    loss = (amplifier(x).float() - 500).abs().sum()
    optimizer.zero_grad()
    (loss * scaler.scale).backward()
    if any(not parameter.grad.isfinite().all() for parameter in parameters):
        print("skip", scaler.scale, loss.item())
        scaler.shrink()
        continue
    for parameter in parameters:
        parameter.grad /= scaler.scale
    optimizer.step()
