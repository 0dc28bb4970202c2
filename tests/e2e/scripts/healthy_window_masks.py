# expect: {id: null, family: healthy, raises: null}
# why: -inf in attention masks on purpose; each row keeps at least one finite score

import torch
from torch import nn


class Window(nn.Module):
    def __init__(self, dim, reach):
        super().__init__()
        self.reach = reach
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        at = torch.arange(x.shape[1])
        outside = (at[:, None] - at[None]).abs() > self.reach
        later = at[None] > at[:, None]
        score = (q @ k.transpose(1, 2)) / q.shape[-1] ** 0.5
        score = score.masked_fill(outside, float("-inf")) + torch.zeros_like(score).masked_fill(later, -torch.inf)
        return x + score.softmax(-1) @ v


class Reader(nn.Module):
    def __init__(self, vocab=40, dim=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.near = nn.Sequential(Window(dim, 2), Window(dim, 4))
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.out(self.near(self.emb(ids)))


torch.manual_seed(0)
reader = Reader()
optimizer = torch.optim.AdamW(reader.parameters(), lr=1e-2)
for step in range(5):
    ids = torch.randint(0, 40, (4, 14))
    loss = nn.functional.cross_entropy(reader(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
