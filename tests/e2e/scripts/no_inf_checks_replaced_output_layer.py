# expect: {id: no-inf-checks, family: scaling, raises: AssertionError}
# at: {op: null, phase: optimizer, step: 1}
# why: the optimizer was made before the output layer was replaced and holds only frozen layers and the old output layer

import torch
from torch import nn


class Calls(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.ear = nn.Sequential(nn.Conv1d(1, 8, 9, stride=4), nn.ReLU(), nn.AdaptiveAvgPool1d(8), nn.Flatten())
        self.name = nn.Linear(64, kinds)

    def forward(self, wave):
        return self.name(self.ear(wave))


torch.manual_seed(3)
net = Calls(kinds=1000)
net.ear.requires_grad_(False)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
net.name = nn.Linear(64, 12)
scaler = torch.amp.GradScaler("cpu")
for batch in range(3):
    wave, kind = torch.randn(8, 1, 256), torch.randint(0, 12, (8,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(wave), kind)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(batch, loss.item())
