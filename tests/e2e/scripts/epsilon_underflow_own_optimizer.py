# expect: {id: optimizer-epsilon-underflow, family: nonfinite, raises: null}
# at: {fqn: '0', op: aten.div.Tensor, phase: optimizer, step: 1}
# why: a home-made optimizer adds 1e-10 to a float16 root mean square that is zero for a dead input column

import torch
from torch import nn


class Rms(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, keep=0.9, tiny=1e-10):
        super().__init__(params, {"lr": lr, "keep": keep, "tiny": tiny})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                mean = state.setdefault("mean", torch.zeros_like(p))
                mean.mul_(group["keep"]).add_(p.grad * p.grad, alpha=1 - group["keep"])
                p.sub_(group["lr"] * (p.grad / (mean.sqrt() + group["tiny"])))


torch.manual_seed(2)
model = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 1)).to(torch.float16)
optimizer = Rms(model.parameters(), lr=1e-2)
for epoch in range(3):
    x = torch.randn(64, 9).half()
    x[:, 5] = 0
    loss = (model(x).float().squeeze(-1) - x.float().sum(-1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(epoch, loss.item())
