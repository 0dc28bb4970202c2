# expect: {id: update-stall, family: silent, raises: null}
# at: {op: null, phase: optimizer, step: 1}
# shows: 'weights moved: 0 of'
# why: bfloat16 weights near one, and updates far below half a unit in the last place

import torch
from torch import nn


class Gain(nn.Module):
    def __init__(self, bands):
        super().__init__()
        self.level = nn.Parameter(torch.ones(bands))

    def forward(self, spectrum):
        return spectrum * self.level


torch.manual_seed(1)
gain = Gain(64).to(torch.bfloat16)
start = gain.level.detach().clone()
optimizer = torch.optim.SGD(gain.parameters(), lr=1e-3)
target = torch.linspace(0.7, 1.3, 64)
for step in range(40):
    spectrum = torch.randn(32, 64)
    loss = (gain(spectrum.bfloat16()).float() - spectrum * target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, round(loss.item(), 5))
print("weights moved:", int((gain.level != start).sum()), "of", start.numel())
