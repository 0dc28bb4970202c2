# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: twice.0, op: aten.addmm.default, phase: recompute, step: 1}
# why: forward runs in bfloat16, the home-made checkpoint re-enters autocast with a hard-wired float16

import torch
from torch import nn


class Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.autocast("cpu", dtype=torch.float16):
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class Echo(nn.Module):
    def __init__(self, dim=20):
        super().__init__()
        self.enter = nn.Linear(4, dim)
        self.twice = nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim), nn.Linear(dim, dim))
        self.leave = nn.Linear(dim, 1)

    def forward(self, x):
        return self.leave(Again.apply(self.twice, self.enter(x)))


torch.manual_seed(6)
echo = Echo()
nn.init.normal_(echo.twice[0].weight, std=1.5e4)
opt = torch.optim.SGD(echo.parameters(), lr=1e-4)
for step in range(2):
    x = 10 * torch.randn(12, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = echo(x).float().square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, "loss", loss.item(), "finite:", bool(echo.enter.weight.isfinite().all()))
