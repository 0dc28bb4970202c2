# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: gather, op: aten.index_add_.default, phase: forward, step: 1}
# why: item vectors are summed per basket by index_add_ in float16

import torch
from torch import nn


class Gather(nn.Module):
    def forward(self, vectors, basket, count):
        total = vectors.new_zeros(count, vectors.shape[-1])
        total.index_add_(0, basket, vectors)
        return total


class Baskets(nn.Module):
    def __init__(self, items=300, dim=12):
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.gather = Gather()
        self.norm = nn.LayerNorm(dim)
        self.spend = nn.Linear(dim, 1)

    def forward(self, item, price, basket, count):
        vectors = self.items(item) * price[:, None]
        return self.spend(self.norm(self.gather(vectors, basket, count))).squeeze(-1)


torch.manual_seed(1)
baskets = Baskets()
nn.init.uniform_(baskets.items.weight, 0.5, 1.5)
baskets.half()
item, basket = torch.randint(0, 300, (800,)), torch.randint(0, 4, (800,))
price = torch.full((800,), 700.0, dtype=torch.float16)
spend = baskets(item, price, basket, 4)
print("spend per basket", spend.tolist())
