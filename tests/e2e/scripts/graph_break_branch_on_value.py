# expect: {id: compile-graph-break, family: compile-load, raises: null}
# at: {fqn: ['', guard], op: null, phase: compile}
# why: a Python branch on a tensor's value inside a compiled forward

import torch
from torch import nn


class Guard(nn.Module):
    def forward(self, x):
        if x.abs().max().item() > 50:
            x = x / 2
        return x


class Thermostat(nn.Module):
    def __init__(self):
        super().__init__()
        self.room = nn.Linear(6, 24)
        self.guard = Guard()
        self.set = nn.Linear(24, 1)

    def forward(self, x):
        return self.set(torch.relu(self.guard(self.room(x))))


torch.manual_seed(0)
thermostat = Thermostat()
fast = torch.compile(thermostat, backend="eager")
optimizer = torch.optim.SGD(thermostat.parameters(), lr=0.01)
for hour in range(3):
    x = torch.randn(32, 6)
    loss = (fast(x).squeeze(-1) - x.mean(-1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(hour, loss.item())
