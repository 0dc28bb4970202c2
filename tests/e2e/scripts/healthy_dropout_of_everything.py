# expect: {id: null, family: healthy, raises: null}
# why: dropout of everything (p = 1) in one branch and of a tenth in another, in float16

import torch
from torch import nn


class Courier(nn.Module):
    def __init__(self, size=24):
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.never = nn.Dropout(1.0)
        self.seldom = nn.Dropout(0.1)
        self.out = nn.Linear(size, 4)

    def forward(self, letter):
        fast = self.never(torch.relu(self.first(letter)) * 30)
        slow = self.seldom(torch.relu(self.second(letter)))
        return self.out(fast + slow)


torch.manual_seed(3)
courier = Courier()
optimizer = torch.optim.AdamW(courier.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for day in range(6):
    letters, street = torch.randn(16, 24), torch.randint(4, (16,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(courier(letters), street)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(day, loss.item())
