# expect: {id: fully-masked-row, family: nonfinite, raises: null}
# at: {fqn: pool, op: aten._softmax.default, phase: forward, step: 2}
# why: the second batch holds an empty review, whose every position is filled with -inf before the softmax

import torch
from torch import nn


class WeightedPool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, x, keep):
        s = self.score(x).squeeze(-1).masked_fill(~keep, float("-inf"))
        return (s.softmax(-1).unsqueeze(-1) * x).sum(1)


class Reviews(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(200, 24, padding_idx=0)
        self.pool = WeightedPool(24)
        self.stars = nn.Linear(24, 5)

    def forward(self, ids):
        return self.stars(self.pool(self.emb(ids), ids != 0))


def batches():
    for lengths in ([5, 9, 3, 7], [4, 0, 8, 6], [2, 2, 9, 1]):
        ids = torch.zeros(4, 9, dtype=torch.long)
        for row, n in enumerate(lengths):
            ids[row, :n] = torch.randint(1, 200, (n,))
        yield ids, torch.randint(0, 5, (4,))


torch.manual_seed(0)
reviews = Reviews()
optimizer = torch.optim.Adam(reviews.parameters(), lr=1e-3)
for number, (ids, stars) in enumerate(batches()):
    loss = nn.functional.cross_entropy(reviews(ids), stars)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("batch", number, "loss", loss.item())
