# expect: {id: float16-overflow, family: nonfinite, raises: RuntimeError}
# at: {fqn: rows.0.look, op: aten.masked_fill.Scalar, phase: forward, step: 1}
# why: a mask is filled with -1e9, which float16 cannot hold, and torch refuses

import torch
from torch import nn

torch.manual_seed(0)


class Look(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.three = nn.Linear(width, 3 * width)

    def forward(self, seats, free):
        query, key, value = self.three(seats).chunk(3, -1)
        weights = (query @ key.transpose(1, 2)) * seats.shape[-1] ** -0.5
        weights = weights.masked_fill(free == 0, -1e9)
        return weights.softmax(-1) @ value


class Theatre(nn.Module):
    def __init__(self):
        super().__init__()
        self.seat = nn.Embedding(9, 8)
        self.rows = nn.ModuleList([nn.ModuleDict({"look": Look(8)})])

    def forward(self, seats, free):
        hidden = self.seat(seats)
        for row in self.rows:
            hidden = hidden + row["look"](hidden, free)
        return hidden


theatre = Theatre().half()
print(theatre(torch.randint(9, (2, 5)), torch.tril(torch.ones(5, 5))).sum())
