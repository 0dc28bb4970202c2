# expect: {id: gradient-underflow, family: silent, raises: null}
# at: {op: null, phase: backward, step: 1}
# shows: 'first layer gradient 0\.0e\+00'
# why: float16 autocast without a scaler over a mean of very many elements

import torch
from torch import nn


class Sounds(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.enc = nn.Conv1d(1, width, 5, padding=2)
        self.dec = nn.Conv1d(width, 1, 5, padding=2)

    def forward(self, wave):
        return self.dec(torch.relu(self.enc(wave)))


torch.manual_seed(12)
net = Sounds()
with torch.no_grad():
    net.dec.weight.mul_(1e-2)
opt = torch.optim.SGD(net.parameters(), lr=0.5)
for step in range(3):
    wave = 0.01 * torch.randn(8, 1, 8000)
    with torch.autocast("cpu", dtype=torch.float16):
        rebuilt = net(wave)
    loss = nn.functional.mse_loss(rebuilt.float(), wave)
    opt.zero_grad()
    loss.backward()
    size = net.enc.weight.grad.abs().max().item()
    opt.step()
    print(f"{step} loss {loss.item():.3e} first layer gradient {size:.1e}")
