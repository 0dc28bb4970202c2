# expect: {id: attention-score-overflow, family: nonfinite, raises: null}
# at: {fqn: look.1, op: aten.bmm.default, phase: forward, step: 1}
# why: queries and keys are multiplied in float16 before the division by sqrt(d)

import math

import torch
from torch import nn


class Look(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def split(self, x):
        b, t, d = x.shape
        return x.view(b, t, self.heads, d // self.heads).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        near = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        y = torch.softmax(near, dim=-1) @ v
        return x + y.transpose(1, 2).flatten(2)


class Openings(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.piece = nn.Embedding(13, dim)
        self.look = nn.Sequential(Look(dim, 2), Look(dim, 2))
        self.move = nn.Linear(dim, 64)

    def forward(self, board):
        return self.move(self.look(self.piece(board)).mean(1))


torch.manual_seed(0)
net = Openings()
with torch.no_grad():
    net.look[1].q.weight.mul_(250)
    net.look[1].k.weight.mul_(250)
net.half()
board = torch.randint(0, 13, (4, 64))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
loss = nn.functional.cross_entropy(net(board).float(), torch.randint(0, 64, (4,)))
loss.backward()
optimizer.step()
print("loss", loss.item())
