# expect: {id: null, family: healthy, raises: null}
# why: low-rank branches in pure bfloat16 start at zero and move at a rate that bfloat16 can represent

import torch
from torch import nn


class Runner(nn.Module):
    def __init__(self, size=32, rank=4):
        super().__init__()
        self.track = nn.Linear(size, size).requires_grad_(False)
        self.left = nn.Linear(size, rank, bias=False)
        self.right = nn.Linear(rank, size, bias=False)
        nn.init.zeros_(self.right.weight)

    def forward(self, x):
        return torch.tanh(self.track(x) + self.right(self.left(x)))


torch.manual_seed(6)
team = nn.Sequential(Runner(), Runner()).to(torch.bfloat16)
optimizer = torch.optim.AdamW([p for p in team.parameters() if p.requires_grad], lr=2e-2, weight_decay=0.0)
for lap in range(10):
    x = torch.randn(64, 32, dtype=torch.bfloat16)
    loss = (team(x) - x.roll(1, -1)).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(lap, round(loss.item(), 3))
