# expect: {id: divergence, family: nonfinite, raises: null}
# at: {fqn: back, op: aten.addmm.default, phase: forward, step: 3}
# shows: '2 nan|2 inf'
# why: the warm-up multiplies the learning rate by ten each step until weights and loss have grown a hundredfold, and a linear's float16 output is inf in the third

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
opt = torch.optim.Adam(ae.parameters(), lr=3.0)
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda count: 10.0**count)
for step in range(4):
    spectrum = torch.rand(32, 64) * 4
    with torch.autocast("cpu", dtype=torch.float16):
        rebuilt = ae(spectrum)
    loss = (rebuilt.float() - spectrum).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    warm.step()
    print(step, round(loss.item(), 2))
