# expect: {id: rounded-rotary-buffer, family: silent, raises: null}
# at: {fqn: spin, op: null, phase: static}
# shows: 'largest angle error [0-9.]*[1-9]'
# why: model.to(bfloat16) rounds the inverse frequencies; a later float() cannot bring them back

import torch
from torch import nn


class Spin(nn.Module):
    def __init__(self, size, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", base ** (-torch.arange(0, size, 2).float() / size), persistent=False)

    def forward(self, x):
        t = torch.arange(x.shape[1], dtype=torch.float32)
        angle = torch.outer(t, self.inv_freq.float())
        c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat([a * c - b * s, b * c + a * s], -1)


class Phrases(nn.Module):
    def __init__(self, dim=32, vocab=60):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.spin = Spin(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        q, k, v = self.qkv(self.emb(ids)).chunk(3, -1)
        y = nn.functional.scaled_dot_product_attention(self.spin(q), self.spin(k), v, is_causal=True)
        return self.out(y)


torch.manual_seed(0)
phrases = Phrases()
exact = phrases.spin.inv_freq.clone()
phrases = phrases.to(torch.bfloat16).eval()
with torch.no_grad():
    logits = phrases(torch.randint(0, 60, (1, 512)))
off = (phrases.spin.inv_freq.float() - exact).abs().max() * 512
print("next", logits[0, -1].argmax().item(), f"largest angle error {off.item():.2f} rad")
