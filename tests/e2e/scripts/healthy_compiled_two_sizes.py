# expect: {id: null, family: healthy, raises: null}
# why: a compiled model without a graph break, with two input sizes

import torch
from torch import nn


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        self.into = nn.Linear(9, 32)
        self.mid = nn.ModuleList([nn.Linear(32, 32) for _ in range(2)])
        self.out = nn.Linear(32, 1)

    def forward(self, x):
        h = torch.relu(self.into(x))
        for layer in self.mid:
            h = h + torch.where(h > 1, layer(h), h * 0.5)
        return self.out(h).squeeze(-1)


torch.manual_seed(19)
smooth = torch.compile(Smooth(), backend="eager", fullgraph=True)
opt = torch.optim.SGD(smooth.parameters(), lr=1e-3)
for step in range(6):
    x = torch.randn(16 if step % 2 else 24, 9)
    loss = nn.functional.mse_loss(smooth(x), x.mean(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
