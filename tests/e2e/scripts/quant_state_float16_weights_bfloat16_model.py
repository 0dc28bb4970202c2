# expect: {id: quant-state-dtype, family: mismatch, raises: RuntimeError}
# at: {fqn: wide, op: aten.mm.default, phase: forward, step: 1, raised_in: ''}
# born: quant-state
# born_fqn: wide
# why: the weights were quantised from float16, so they dequantise to float16 beside bfloat16 activations

import bitsandbytes.functional as q4
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn


def squeeze(layer, dtype=torch.float16):
    small = Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4")
    small.weight = Params4bit(layer.weight.data.to(dtype), requires_grad=False, quant_type="nf4")
    return small.to("cpu")


class Laptop(nn.Module):
    def __init__(self, dim=64, vocab=128):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, dtype=torch.bfloat16)
        self.wide = squeeze(nn.Linear(dim, 4 * dim, bias=False))
        self.slim = squeeze(nn.Linear(4 * dim, dim, bias=False))

    def project(self, x, layer):
        w = q4.dequantize_4bit(layer.weight, layer.weight.quant_state)
        return torch.matmul(x, w.t())

    def forward(self, ids):
        h = self.emb(ids)
        h = h + self.project(nn.functional.silu(self.project(h, self.wide)), self.slim)
        return h @ self.emb.weight.t()


torch.manual_seed(0)
lm = Laptop().eval()
with torch.no_grad():
    ids = torch.randint(0, 128, (1, 12))
    for _ in range(6):
        ids = torch.cat([ids, lm(ids)[:, -1:].argmax(-1)], dim=1)
print(ids.tolist())
