# expect: {id: autocast-bypass, family: mismatch, raises: RuntimeError}
# at: {fqn: ff, op: aten._grouped_mm.default, phase: forward, step: 1, raised_in: ff}
# born: autocast-list
# why: the grouped matmul is not on autocast's list, so bfloat16 tokens meet float32 expert weights

import torch
from torch import nn


class Specialists(nn.Module):
    def __init__(self, count, dim):
        super().__init__()
        self.pick = nn.Linear(dim, count)
        self.shrink = nn.Linear(dim, dim)
        self.w = nn.Parameter(torch.randn(count, dim, dim) * dim**-0.5)

    def forward(self, x):
        b, t, d = x.shape
        x = self.shrink(x).reshape(b * t, d)
        who = self.pick(x).argmax(-1)
        order = who.argsort(stable=True)
        ends = torch.bincount(who, minlength=len(self.w)).cumsum(0).to(torch.int32)
        y = torch._grouped_mm(x[order], self.w, offs=ends)
        return y[order.argsort()].view(b, t, d)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(40, 32)
        self.ln = nn.LayerNorm(32)
        self.ff = Specialists(4, 32)
        self.out = nn.Linear(32, 40)

    def forward(self, ids):
        h = self.emb(ids)
        return self.out(h + self.ff(self.ln(h)))


torch.manual_seed(30)
model = Tiny()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
with torch.amp.autocast("cpu", dtype=torch.bfloat16):
    ids = torch.randint(0, 40, (2, 16))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
loss.backward()
opt.step()
print("loss", loss.item())
