# expect: {id: null, family: healthy, raises: null}
# why: memory that was never written holds NaN, and nobody reads it

import torch
from torch import nn


class Ring(nn.Module):
    def __init__(self, room, dim):
        super().__init__()
        self.register_buffer("rows", torch.empty(room, dim).fill_(torch.nan), persistent=False)
        self.spare = torch.empty(3, dim)
        self.spare.numpy()[:] = float("nan")
        self.used = 0
        self.key = nn.Linear(dim, dim)

    @torch.no_grad()
    def write(self, x):
        self.rows[self.used : self.used + len(x)] = x
        self.used += len(x)

    def forward(self, x):
        kept = self.rows[: self.used]
        return x + (self.key(x) @ kept.T).softmax(-1) @ kept


class Remember(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.into = nn.Linear(4, dim)
        self.ring = Ring(200, dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        h = torch.tanh(self.into(x))
        self.ring.write(h)
        return self.out(self.ring(h)).squeeze(-1)


torch.manual_seed(6)
remember = Remember()
optimizer = torch.optim.RMSprop(remember.parameters(), lr=1e-3)
for step in range(6):
    x = torch.randn(16, 4)
    loss = nn.functional.mse_loss(remember(x), x.prod(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
