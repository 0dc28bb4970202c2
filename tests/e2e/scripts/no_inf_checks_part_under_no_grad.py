# expect: {id: no-inf-checks, family: scaling, raises: AssertionError}
# at: {op: null, phase: optimizer, step: 1}
# why: one of two optimizers owns a part that runs under no_grad and so never gets a gradient

import torch
from torch import nn


class River(nn.Module):
    def __init__(self):
        super().__init__()
        self.gauge = nn.GRU(4, 16, batch_first=True)
        self.level = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, rain):
        with torch.no_grad():
            _, last = self.gauge(rain)
        return self.level(last[0]).squeeze(-1)


torch.manual_seed(8)
river = River()
slow = torch.optim.SGD(river.gauge.parameters(), lr=1e-3)
fast = torch.optim.SGD(river.level.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
for day in range(3):
    rain, level = torch.rand(16, 24, 4), torch.rand(16)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(river(rain).float(), level)
    scaler.scale(loss).backward()
    for optimizer in (slow, fast):
        scaler.step(optimizer)
        optimizer.zero_grad()
    scaler.update()
    print(day, loss.item())
