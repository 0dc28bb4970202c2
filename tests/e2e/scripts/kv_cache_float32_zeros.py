# expect: {id: kv-cache-dtype, family: mismatch, raises: RuntimeError}
# at: {fqn: layers.0.attn, op: aten.scaled_dot_product_attention.default, phase: forward, step: 1,
#   raised_in: layers.0.attn}
# born: cache
# why: a cache object made with torch.zeros is float32; writing slices into it casts in silence, attention refuses what it reads

import torch
from torch import nn


class KVCache:
    def __init__(self, batch, heads, length, dim):
        self.k = torch.zeros(batch, heads, length, dim)
        self.v = torch.zeros(batch, heads, length, dim)
        self.pos = 0

    def update(self, k, v):
        n = k.shape[2]
        self.k[:, :, self.pos : self.pos + n] = k
        self.v[:, :, self.pos : self.pos + n] = v
        self.pos += n
        return self.k[:, :, : self.pos], self.v[:, :, : self.pos]


class Attn(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x, cache):
        b, t, d = x.shape
        q, k, v = (w(x).view(b, t, self.h, d // self.h).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        k, v = cache.update(k, v)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=t > 1)
        return self.wo(y.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n = nn.LayerNorm(d)
        self.attn = Attn(d, h)
        self.mlp = nn.Linear(d, d)

    def forward(self, x, c):
        x = x + self.attn(self.n(x), c)
        return x + nn.functional.gelu(self.mlp(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(Layer(32, 4) for _ in range(2))
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, ids, caches):
        x = self.emb(ids)
        for l, c in zip(self.layers, caches, strict=True):
            x = l(x, c)
        return self.lm_head(x)


torch.manual_seed(0)
lm = LM().to(dtype=torch.bfloat16).eval()
caches = [KVCache(1, 4, 32, 8) for _ in lm.layers]
ids = torch.tensor([[3, 5, 7]])
with torch.inference_mode():
    for _ in range(6):
        nxt = lm(ids, caches)[:, -1].argmax(-1, keepdim=True)
        ids = nxt
        print(nxt.item())
