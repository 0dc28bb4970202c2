# expect: {id: kv-cache-dtype, family: mismatch, raises: RuntimeError}
# at: {fqn: '', op: aten.index_put_.default, phase: forward, step: 1, raised_in: ''}
# born: cache
# born_fqn: ""
# why: the paged store is float16 by its own default, the model computes in bfloat16

import torch
from torch import nn


class Pages:
    def __init__(self, slots, dim, dtype=torch.float16):
        self.k = torch.zeros(slots, dim, dtype=dtype)
        self.v = torch.zeros(slots, dim, dtype=dtype)
        self.free = list(range(slots))
        self.table = []

    def take(self, n):
        rows = torch.tensor([self.free.pop(0) for _ in range(n)])
        self.table.append(rows)
        return rows

    def rows(self):
        return torch.cat(self.table)


class Responder(nn.Module):
    def __init__(self, dim=48, vocab=70):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.logits = nn.Linear(dim, vocab)

    def forward(self, ids, pages):
        q, k, v = self.qkv(self.emb(ids)).chunk(3, -1)
        rows = pages.take(len(ids))
        pages.k[rows] = k
        pages.v[rows] = v
        seen = pages.rows()
        weight = (q @ pages.k[seen].T / q.shape[-1] ** 0.5).softmax(-1)
        return self.logits(weight @ pages.v[seen])


torch.manual_seed(21)
bot = Responder().to(torch.bfloat16)
pages = Pages(32, 48)
with torch.inference_mode(False), torch.no_grad():
    said = torch.randint(0, 70, (6,))
    for _ in range(5):
        said = bot(said, pages)[-1:].argmax(-1)
        print(said.item(), end=" ")
