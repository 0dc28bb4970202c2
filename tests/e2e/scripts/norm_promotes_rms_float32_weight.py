# expect: {id: norm-promotes-to-float32, family: mismatch, raises: RuntimeError}
# at: {fqn: layers.0.pre, op: aten.mm.default, phase: forward, step: 1, raised_in: layers.0.mix.qkv}
# born: norm
# born_fqn: layers.0.pre
# why: the RMS norm multiplies by a float32 weight after casting back, so its output is float32 for a bfloat16 linear

import torch
from torch import nn


class Scale(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return self.gain * y.to(x.dtype)


class Mix(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.back = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.back(y.transpose(1, 2).reshape(b, t, d))


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.pre, self.mix = Scale(dim), Mix(dim, 4)

    def forward(self, x):
        return x + self.mix(self.pre(x))


class Stories(nn.Module):
    def __init__(self, vocab=64, dim=32):
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Layer(dim) for _ in range(2)])

    def forward(self, ids):
        h = self.tokens(ids)
        for layer in self.layers:
            h = layer(h)
        return h @ self.tokens.weight.T


torch.manual_seed(0)
model = Stories()
for module in model.modules():
    if isinstance(module, nn.Linear | nn.Embedding):
        module.to(torch.bfloat16)
ids = torch.randint(0, 64, (2, 16))
logits = model(ids)
print("loss", nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item())
