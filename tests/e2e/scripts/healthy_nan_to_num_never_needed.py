# expect: {id: null, family: healthy, raises: null}
# why: nan_to_num and clamp stand in the path and never have anything to do

import torch
from torch import nn


class Careful(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.lin = nn.Linear(dim, dim)

    def forward(self, x):
        y = torch.nan_to_num(self.lin(x), nan=0.0, posinf=1e4, neginf=-1e4)
        return y.clamp(-65504, 65504)


class Cleaning(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Careful(16) for _ in range(3)])
        self.score = nn.Linear(16, 2)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.score(x)


torch.manual_seed(8)
cleaning = Cleaning()
opt = torch.optim.SGD(cleaning.parameters(), lr=0.1)
for step in range(5):
    x = torch.nan_to_num(torch.randn(20, 16))
    y = (x[:, 0] > 0).long()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = cleaning(x)
    loss = nn.functional.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
