# expect:
#   id: float16-overflow
#   fqn: code
#   op: aten.addmm.default
#   phase: forward
#   step: 3
#   raises: null
#   family: nonfinite
#   shows: '2 nan'
#   why: a far too large learning rate makes the weights grow until a linear's float16 output is inf in the third step

import torch
from torch import nn


class MusicAE(nn.Module):
    def __init__(self, bands=64, size=16):
        super().__init__()
        self.code = nn.Linear(bands, size)
        self.back = nn.Linear(size, bands)

    def forward(self, spectrum):
        return self.back(self.code(spectrum))


torch.manual_seed(5)
ae = MusicAE()
opt = torch.optim.SGD(ae.parameters(), lr=0.9)
for step in range(4):
    spectrum = torch.rand(32, 64) * 4
    with torch.autocast("cpu", dtype=torch.float16):
        rebuilt = ae(spectrum)
    loss = (rebuilt.float() - spectrum).square().sum(-1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, round(loss.item(), 2))
