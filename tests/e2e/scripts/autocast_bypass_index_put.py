# expect: {id: [autocast-bypass, merge-dtype-mismatch], family: mismatch, raises: RuntimeError}
# at: {fqn: '', op: aten.index_put_.default, phase: forward, step: 1, raised_in: ''}
# born: autocast-list
# why: under autocast the picture projection is bfloat16 and the embedding, which is not on the list, float32

import torch
from torch import nn


class ProductEncoder(nn.Module):
    def __init__(self, dim=40, vocab=90):
        super().__init__()
        self.lookup = nn.Embedding(vocab, dim)
        self.from_pixels = nn.Linear(108, dim)
        self.mixer = nn.GRU(dim, dim, batch_first=True)
        self.slot = 1

    def forward(self, ids, patches):
        x = self.lookup(ids).clone()
        x[ids == self.slot] = self.from_pixels(patches)
        _, last = self.mixer(x)
        return nn.functional.normalize(last[0], dim=-1)


torch.manual_seed(1)
towers = ProductEncoder()
opt = torch.optim.Adam(towers.parameters(), lr=1e-3)
for it in range(3):
    ids = torch.randint(2, 90, (6, 9))
    ids[:, 0] = towers.slot
    with torch.autocast("cpu", torch.bfloat16):
        vec = towers(ids, torch.randn(6, 108))
    loss = -(vec.float() @ vec.float().T).diagonal().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(it, loss.item())
