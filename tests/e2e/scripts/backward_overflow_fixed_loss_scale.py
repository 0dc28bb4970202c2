# expect: {id: backward-overflow, family: nonfinite, raises: null}
# at: {fqn: out, op: aten.mm.default, phase: backward, step: 1}
# why: a fixed loss scale without a scaler; the output layer's weight gradient leaves float16's range

import torch
from torch import nn

SCALE = 2.0**16


class Tides(nn.Module):
    def __init__(self):
        super().__init__()
        self.moon = nn.Linear(6, 48)
        self.out = nn.Linear(48, 2)

    def forward(self, x):
        return self.out(torch.relu(self.moon(x)))


torch.manual_seed(2)
tides = Tides()
opt = torch.optim.SGD(tides.parameters(), lr=1e-3)
for step in range(3):
    phase = torch.randn(128, 6) * 4
    height = phase[:, :2] * 5
    with torch.autocast("cpu", dtype=torch.float16):
        guess = tides(phase)
    loss = nn.functional.mse_loss(guess.float(), height)
    (loss * SCALE).backward()
    for p in tides.parameters():
        p.grad /= SCALE
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
