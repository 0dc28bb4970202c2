# expect: {id: autocast-bypass, family: mismatch, raises: RuntimeError}
# at: {fqn: body.1, op: aten.addmm_.default, phase: forward, step: 1, raised_in: body.1}
# born: inplace
# born_fqn: body.1
# why: autocast gives the two matmuls bfloat16 results, the in-place accumulation keeps the float32 of its target

import torch
from torch import nn


class Branch(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, w, a, b):
        base = torch.empty_like(x)
        base.copy_(x @ w.t())
        base.addmm_(x @ a.t(), b.t())
        ctx.save_for_backward(x, w, a, b)
        return base

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, g):
        x, w, a, b = ctx.saved_tensors
        return g @ w + g @ b @ a, None, (g @ b).t() @ x, g.t() @ (x @ a.t())


class Side(nn.Module):
    def __init__(self, dim, rank=4):
        super().__init__()
        self.w = nn.Parameter(torch.randn(dim, dim) / dim**0.5, requires_grad=False)
        self.a = nn.Parameter(torch.randn(rank, dim) / dim**0.5)
        self.b = nn.Parameter(torch.zeros(dim, rank))

    def forward(self, x):
        return Branch.apply(x, self.w, self.a, self.b)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(32), Side(32), nn.Tanh())
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.body(x))


torch.manual_seed(0)
net = Net()
opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-3)
for step in range(3):
    x = torch.randn(16, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = net(x).float().pow(2).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
