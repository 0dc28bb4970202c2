# expect: {id: packed-weight-used-as-dense, family: mismatch, raises: RuntimeError}
# at: {fqn: mixer, op: aten.addmm.default, phase: forward, step: 1, raised_in: mixer}
# born: quant-state
# why: nn.MultiheadAttention multiplies by out_proj.weight itself, which here holds packed 4-bit bytes

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn


def to_four_bit(linear):
    new = Linear4bit(linear.in_features, linear.out_features, compute_dtype=torch.bfloat16, quant_type="nf4")
    new.weight = Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    new.bias = linear.bias
    return new.to("cpu")


class Encoder(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.mixer = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.feed = nn.Linear(dim, dim)

    def forward(self, x):
        y, _ = self.mixer(x, x, x, need_weights=False)
        x = self.norm(x + y)
        return x + self.feed(x)


torch.manual_seed(0)
encoder = Encoder().to(torch.bfloat16).train()
for parent in list(encoder.modules()):
    for name, child in list(parent.named_children()):
        if isinstance(child, nn.Linear):
            setattr(parent, name, to_four_bit(child))
frames = torch.randn(2, 10, 64, dtype=torch.bfloat16)
print("encoded", encoder(frames).shape)
