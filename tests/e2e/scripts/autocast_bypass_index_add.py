# expect: {id: autocast-bypass, family: mismatch, raises: RuntimeError}
# at: {fqn: mixture, op: aten.index_add_.default, phase: forward, step: 1, raised_in: mixture}
# born: [autocast-list, inplace]
# why: expert linears come out bfloat16 under autocast, index_add_ into the float32 accumulator is not autocast

import torch
from torch import nn


class Mixture(nn.Module):
    def __init__(self, dim, n):
        super().__init__()
        self.switch = nn.Linear(dim, n)
        self.parts = nn.ModuleList([nn.Linear(dim, dim) for _ in range(n)])

    def forward(self, x):
        best = self.switch(x).argmax(-1)
        out = x.new_zeros(x.shape)
        for i, part in enumerate(self.parts):
            rows = (best == i).nonzero().squeeze(-1)
            out.index_add_(0, rows, torch.relu(part(x[rows])))
        return out


class Recommender(nn.Module):
    def __init__(self, users=50, items=80, dim=24):
        super().__init__()
        self.users, self.items = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.mixture = Mixture(dim, 3)

    def forward(self, user, item):
        return (self.mixture(self.users(user)) * self.items(item)).sum(-1)


torch.manual_seed(17)
model = Recommender()
optim = torch.optim.Adagrad(model.parameters(), lr=0.05)
for batch in range(3):
    user, item = torch.randint(0, 50, (64,)), torch.randint(0, 80, (64,))
    rating = torch.rand(64)
    optim.zero_grad()
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
        guess = model(user, item)
        loss = nn.functional.mse_loss(guess.float(), rating)
    loss.backward()
    optim.step()
    print(f"batch {batch} mse {loss.item():.3f}")
