# expect: {id: null, family: healthy, raises: null}
# why: one autocast region around the whole loop, but with its cache switched off

import torch
from torch import nn

torch.manual_seed(10)
pen = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(pen.parameters(), lr=0.1)
with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
    for stroke in range(8):
        x = torch.randn(32, 10)
        loss = (pen(x).squeeze(-1).float() - x[:, 0]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(stroke, loss.item())
