# expect: {id: null, family: healthy, raises: null}
# why: the logarithm of negative entries is NaN but torch.where never chooses it, forward or backward

import torch
from torch import nn


class LogScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return torch.where(x > 0.01, torch.log(x) * self.slope, x)


class Sales(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = LogScale()
        self.net = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 1))

    def forward(self, x):
        return self.net(self.scale(x))


torch.manual_seed(1)
sales = Sales()
opt = torch.optim.Adam([sales.net[0].weight, sales.net[0].bias, *sales.net[2].parameters()], lr=1e-2)
sales.scale.requires_grad_(False)
for week in range(6):
    x = torch.randn(40, 5) * 3
    loss = nn.functional.smooth_l1_loss(sales(x).squeeze(-1), x.sum(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print("week", week, loss.item())
