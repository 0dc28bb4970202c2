# expect: {id: fully-masked-row, family: nonfinite, raises: null}
# at: {fqn: heads, op: [aten.add.Tensor, aten._softmax.default], phase: forward, step: 1}
# why: additive masks of the smallest float16 number, for the future, padded keys and padded queries, sum to -inf in whole rows

import torch
from torch import nn


def causal(n, dtype):
    low = torch.finfo(dtype).min
    return torch.triu(torch.full((n, n), low, dtype=dtype), diagonal=1)


class Heads(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x, gone):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        low = torch.finfo(x.dtype).min
        mask = causal(x.shape[1], x.dtype) + gone[:, None, :] * low + gone[:, :, None] * low
        return (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5 + mask).softmax(-1) @ v


class Prompted(nn.Module):
    def __init__(self, dim=32, vocab=70):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.heads = Heads(dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids, keep):
        h = self.emb(ids)
        return self.out(h + self.heads(h, 1.0 - keep.to(h.dtype)))


torch.manual_seed(5)
prompted = Prompted().half().eval()
ids = torch.randint(0, 70, (2, 10))
keep = torch.ones(2, 10, dtype=torch.long)
keep[1, :4] = 0
with torch.no_grad():
    logits = prompted(ids, keep).float()
print("mean log-prob", logits.log_softmax(-1).mean().item())
