# expect: {id: recompute-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: clip.body, op: aten.addmm.default, phase: recompute, step: 1, raised_in: '1'}
# why: a home-made checkpoint function recomputes outside the autocast region that the forward ran in

import torch
from torch import nn


class Forget(torch.autograd.Function):
    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            again = ctx.run(x)
        torch.autograd.backward(again, grad)
        return None, x.grad


class Clip(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, x):
        return x + Forget.apply(self.body, x.to(torch.bfloat16))


class Frames(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(75, 48)
        self.clip = Clip()
        self.action = nn.Linear(48, 6)

    def forward(self, video):
        return self.action(self.clip(self.patch(video)).mean(1))


torch.manual_seed(13)
model = Frames()
optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(2):
    video, action = torch.randn(2, 8, 75), torch.randint(0, 6, (2,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(video), action)
    loss.backward()
    optim.step()
    optim.zero_grad()
    print(step, loss.item())
