# expect: {id: attention-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: trunk.0, op: aten.scaled_dot_product_attention.default, phase: forward, step: 1, raised_in: trunk.0}
# born: buffer
# born_fqn: trunk.0
# why: the distance bias came from numpy as float64 and is handed to attention as its mask

import numpy as np
import torch
from torch import nn


class PairBlock(nn.Module):
    def __init__(self, dim, heads, length):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, dim * 3)
        self.merge = nn.Linear(dim, dim)
        index = np.arange(length)
        slope = 2.0 ** -np.arange(1, heads + 1)
        bias = -np.abs(index[None] - index[:, None]) * slope[:, None, None]
        self.register_buffer("bias", torch.from_numpy(bias))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        z = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[:, :n, :n])
        return x + self.merge(z.transpose(1, 2).flatten(2))


class Folder(nn.Module):
    def __init__(self):
        super().__init__()
        self.residues = nn.Embedding(21, 32)
        self.trunk = nn.Sequential(PairBlock(32, 4, 64), PairBlock(32, 4, 64))
        self.contact = nn.Linear(32, 1)

    def forward(self, seq):
        return self.contact(self.trunk(self.residues(seq))).squeeze(-1)


torch.manual_seed(5)
folder = Folder()
seq = torch.randint(0, 21, (2, 40))
opt = torch.optim.AdamW(folder.parameters(), lr=3e-4)
loss = folder(seq).pow(2).mean()
loss.backward()
opt.step()
print(f"loss {loss:.4f}")
