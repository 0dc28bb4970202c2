# expect: {id: custom-function-autocast, family: mismatch, raises: RuntimeError}
# at: {fqn: '1', op: aten.mm.default, phase: backward, step: 1, raised_in: '1'}
# born: custom-fwd
# born_fqn: "1"
# why: custom_fwd/custom_bwd were written for "cuda", so on a CPU the backward runs without the forward's autocast

import torch
from torch import nn


class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class Gate(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.eye(n) + 0.01 * torch.randn(n, n))

    def forward(self, x):
        return torch.sigmoid(Product.apply(x, self.w)) * x


torch.manual_seed(0)
chain = nn.Sequential(nn.Linear(80, 48), Gate(48), nn.ReLU(), nn.Linear(48, 10))
opt = torch.optim.RMSprop(chain.parameters(), lr=1e-3)
for step in range(3):
    x, y = torch.randn(12, 80), torch.randint(0, 10, (12,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(chain(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
