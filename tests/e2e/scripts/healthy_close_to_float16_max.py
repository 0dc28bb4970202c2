# expect: {id: null, family: healthy, raises: null}
# shows: 'peak 5\d{4}'
# why: float16 activations close below 65504, all finite

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
edge = Edge().to(torch.float16).eval()
for batch in range(4):
    x = (torch.randn(64, 3) * 8).half()
    with torch.no_grad():
        y, wide = edge(x)
    print(batch, y.float().mean().item(), "peak", int(wide.float().max()))
