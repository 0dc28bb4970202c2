# expect: {id: merge-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: '', op: aten.masked_scatter.default, phase: forward, step: 1, raised_in: ''}
# born: load-dtype
# born_fqn: page
# why: the page encoder was restored in float16, the language side runs in bfloat16

import io

import torch
from torch import nn


def encoder():
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 24))


class Reader(nn.Module):
    def __init__(self, page):
        super().__init__()
        self.page = page
        self.emb = nn.Embedding(50, 24)
        self.cell = nn.Linear(24, 24)
        self.out = nn.Linear(24, 50)

    def forward(self, ids, strips):
        x = self.emb(ids)
        where = (ids == 0).unsqueeze(-1).expand_as(x)
        x = x.masked_scatter(where, self.page(strips))
        return self.out(torch.relu(self.cell(x)))


torch.manual_seed(3)
stored = io.BytesIO()
torch.save(encoder().half(), stored)
stored.seek(0)

reader = Reader(encoder()).to(torch.bfloat16)
reader.page = torch.load(stored, weights_only=False)
ids = torch.randint(1, 50, (3, 10))
ids[:, :4] = 0
strips = torch.randn(12, 64, dtype=torch.float16)
scores = reader(ids, strips)
print("fields:", scores.argmax(-1)[0].tolist())
