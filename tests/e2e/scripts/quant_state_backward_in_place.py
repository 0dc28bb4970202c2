# expect: {id: quant-state-dtype, family: mismatch, raises: RuntimeError}
# at: {fqn: inner, op: aten.addmm_.default, phase: backward, step: 1, raised_in: inner}
# born: quant-state
# born_fqn: inner
# why: autocast hides the float16 weights in the forward; the hand-written backward adds in place and meets them

import bitsandbytes.functional as q4
import torch
from torch import nn


class Project(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, packed, state, a, b):
        ctx.state = state
        ctx.save_for_backward(x, packed, a, b)
        return x @ q4.dequantize_4bit(packed, state).t() + x @ a.t() @ b.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, packed, a, b = ctx.saved_tensors
        g = g.to(x.dtype)
        dx = g @ b.to(g.dtype) @ a.to(g.dtype)
        dx.addmm_(g, q4.dequantize_4bit(packed, ctx.state))
        return dx, None, None, (g @ b.to(g.dtype)).t() @ x, g.t() @ (x @ a.t().to(x.dtype))


class Inner(nn.Module):
    def __init__(self, dim, rank=4):
        super().__init__()
        self.packed, self.state = q4.quantize_4bit(torch.randn(dim, dim).half() / dim**0.5, quant_type="nf4")
        self.a = nn.Parameter(torch.randn(rank, dim) / dim**0.5)
        self.b = nn.Parameter(torch.zeros(dim, rank))

    def forward(self, x):
        return Project.apply(x, self.packed, self.state, self.a, self.b)


torch.manual_seed(9)
model = nn.Sequential()
model.emb = nn.Embedding(30, 64, dtype=torch.bfloat16)
model.inner = Inner(64)
model.out = nn.Linear(64, 30)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
ids = torch.randint(0, 30, (24,))
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = nn.functional.cross_entropy(model(ids), ids.roll(1))
loss.backward()
opt.step()
print("loss", loss.item())
