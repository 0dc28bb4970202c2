# expect: {id: null, family: healthy, raises: null}
# why: the first step has a learning rate of zero and part of the model is frozen, so unmoved weights are meant

import torch
from torch import nn


class Warm(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(nn.Linear(10, 40), nn.Tanh())
        self.top = nn.Linear(40, 1)

    def forward(self, x):
        return self.top(self.base(x)).squeeze(-1)


torch.manual_seed(20)
warm = Warm()
warm.base.requires_grad_(False)
optimizer = torch.optim.SGD(
    [{"params": warm.base.parameters(), "lr": 0.0}, {"params": warm.top.parameters(), "lr": 0.5}]
)
rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
for step in range(8):
    x = torch.randn(64, 10)
    loss = (warm(x) - x[:, 0]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.3f}", rise.get_last_lr())
    rise.step()
