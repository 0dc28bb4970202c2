# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: blocks.1.ff, op: aten.mul.Tensor, phase: forward, step: 1}
# shows: 'loss nan'
# why: the gated product of the second block leaves float16's range; the projection and the norm behind it pass it on

import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self, dim, wide):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(dim, wide), nn.Linear(dim, wide), nn.Linear(wide, dim)

    def forward(self, x):
        return self.three(nn.functional.silu(self.one(x)) * self.two(x))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.att = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.ff = Gated(dim, 2 * dim)

    def forward(self, x):
        h = self.ln1(x)
        x = x + self.att(h, h, h, need_weights=False)[0]
        return x + self.ff(self.ln2(x))


class Chatter(nn.Module):
    def __init__(self, vocab=64, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(3)])
        self.top = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        h = self.emb(ids)
        for block in self.blocks:
            h = block(h)
        return self.out(self.top(h))


torch.manual_seed(0)
chatter = Chatter()
with torch.no_grad():
    chatter.blocks[1].ff.one.weight.mul_(400)
    chatter.blocks[1].ff.two.weight.mul_(400)
chatter.half()
opt = torch.optim.SGD(chatter.parameters(), lr=1e-3)
for step in range(3):
    ids = torch.randint(0, 64, (2, 12))
    loss = nn.functional.cross_entropy(chatter(ids).float().flatten(0, 1), ids.flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(f"step {step} loss {loss.item():.4f}")
