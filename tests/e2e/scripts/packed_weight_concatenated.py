# expect: {id: packed-weight-used-as-dense, family: mismatch, raises: RuntimeError}
# at: {fqn: mix, op: aten.mm.default, phase: forward, step: 1, raised_in: mix}
# born: quant-state
# why: three packed 4-bit weights are concatenated and multiplied as one matrix; the message speaks of shapes only

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn


class Heads(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(dim, dim, bias=False) for _ in range(3))

    def forward(self, x):
        joined = torch.cat([self.a.weight, self.b.weight, self.c.weight])
        a, b, c = nn.functional.linear(x, joined).chunk(3, dim=-1)
        return x + torch.sigmoid(a) * torch.tanh(b) * c


class Tower(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.emb = nn.Embedding(40, dim)
        self.mix = Heads(dim)
        self.out = nn.Linear(dim, 40)

    def forward(self, ids):
        return self.out(self.mix(self.emb(ids)))


torch.manual_seed(0)
tower = Tower().to(torch.bfloat16).eval()
for name in "abc":
    old = getattr(tower.mix, name)
    new = Linear4bit(old.in_features, old.out_features, bias=False, compute_dtype=torch.bfloat16)
    new.weight = Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
    setattr(tower.mix, name, new.to("cpu"))
with torch.no_grad():
    print(tower(torch.randint(0, 40, (2, 8))).shape)
