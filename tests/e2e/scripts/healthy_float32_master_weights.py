# expect: {id: null, family: healthy, raises: null}
# why: bfloat16 weights with float32 master weights; a small update may round away in the copy but not in the master

import torch
from torch import nn


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.fine = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.fine, lr=lr)

    def step(self, loss):
        loss.backward()
        for fine, p in zip(self.fine, self.model.parameters(), strict=True):
            fine.grad = p.grad.float()
            p.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for fine, p in zip(self.fine, self.model.parameters(), strict=True):
                p.copy_(fine)


torch.manual_seed(7)
model = nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 1)).to(torch.bfloat16)
trainer = Trainer(model, lr=5e-4)
for step in range(20):
    x = torch.randn(32, 10).bfloat16()
    loss = (model(x).float().squeeze(-1) - x.float().sum(-1)).abs().mean()
    trainer.step(loss)
    if step % 5 == 0:
        print(step, loss.item())
