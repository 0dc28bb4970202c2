# expect: {id: null, family: healthy, raises: null}
# why: bucketed distances, fake quantisation to int8 with a straight-through gradient, and lengths are integers on purpose

import math

import torch
from torch import nn


def bucket(rel, n=16, maxd=64):
    n_ = n // 2
    sign = (rel > 0).to(torch.long) * n_
    rel = rel.abs()
    exact = n_ // 2
    large = exact + (torch.log(rel.float().clamp(min=1) / exact) / math.log(maxd / exact) * (n_ - exact)).to(torch.long)
    return sign + torch.where(rel < exact, rel, large.clamp(max=n_ - 1))


class FakeQuant(nn.Linear):
    def forward(self, x):
        s = x.detach().abs().amax(-1, keepdim=True) / 127 + 1e-9
        q = (x / s).round().clamp(-127, 127).to(torch.int8)
        return nn.functional.linear(x + (q.to(x.dtype) * s - x).detach(), self.weight, self.bias)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(64, 32)
        self.bias = nn.Embedding(16, 2)
        self.qkv = FakeQuant(32, 96)
        self.o = nn.Linear(32, 64)

    def forward(self, ids):
        x = self.e(ids)
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, 16).permute(2, 0, 3, 1, 4)
        p = torch.arange(t)
        bias = self.bias(bucket(p[None] - p[:, None])).permute(2, 0, 1)
        lengths = (ids != 0).to(x.dtype).sum(-1).long()
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias[None].to(q.dtype))
        y = y.transpose(1, 2).reshape(b, t, d)
        return self.o(y)[torch.arange(b), lengths - 1]


torch.manual_seed(0)
net = Net()
opt = torch.optim.AdamW(net.parameters(), 1e-3)
for _ in range(4):
    ids = torch.randint(1, 64, (4, 24))
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(net(ids), ids[:, 0])
    opt.zero_grad()
    loss.backward()
    opt.step()
