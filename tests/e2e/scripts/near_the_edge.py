# expect:
#   id: null
#   raises: null
#   family: healthy
#   shows: 'peak 5\d{4}'
#   why: float16 activations close below 65504, all finite

import torch
from torch import nn


class Edge(nn.Module):
    def __init__(self):
        super().__init__()
        self.gauge = nn.Linear(3, 12)
        self.level = nn.Linear(12, 1)

    def forward(self, x):
        wide = torch.sigmoid(self.gauge(x)) * 59000
        return self.level(wide / 59000), wide


torch.manual_seed(22)
edge = Edge().to(torch.float16)
optimizer = torch.optim.SGD(edge.parameters(), lr=0.5)
for step in range(4):
    x = (torch.randn(64, 3) * 8).half()
    y, wide = edge(x)
    loss = (y.float().squeeze(-1) - x.float()[:, 0].sign()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), "peak", int(wide.float().max()))
