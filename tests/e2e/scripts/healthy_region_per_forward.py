# expect: {id: null, family: healthy, raises: null}
# why: one encoder called twice per step, with bfloat16 autocast opened anew for each forward

import torch
from torch import nn


class Strokes(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 16, 5, padding=2)
        self.norm = nn.GroupNorm(4, 16)
        self.lin = nn.Linear(16, 8)

    def forward(self, path):
        return self.lin(torch.relu(self.norm(self.conv(path))).amax(-1))


class Check(nn.Module):
    def __init__(self):
        super().__init__()
        self.strokes = Strokes()

    def forward(self, known, given):
        return (self.strokes(known) - self.strokes(given)).float().square().sum(-1)


torch.manual_seed(13)
check = Check()
optimizer = torch.optim.SGD(check.parameters(), lr=0.02, momentum=0.9)
for step in range(5):
    known = torch.randn(12, 2, 40)
    same = torch.arange(12) % 2 == 0
    given = torch.where(same[:, None, None], known + 0.1 * torch.randn_like(known), torch.randn_like(known))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        far = check(known, given)
    loss = torch.where(same, far, (1 - far).clamp_min(0)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
