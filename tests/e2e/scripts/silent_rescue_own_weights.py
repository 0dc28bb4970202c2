# expect: {id: silent-rescue, family: silent, raises: null}
# at: {fqn: null, op: aten.nan_to_num.default, phase: forward, step: 1}
# shows: 'heaviest 1\.0'
# why: squares of float16 numbers above 256 are inf, in the script's own code between two modules, and nan_to_num makes them 1

import torch
from torch import nn

torch.manual_seed(42)
scales = nn.Linear(6, 2)
optimizer = torch.optim.SGD(scales.parameters(), lr=1e-3)
for market in range(4):
    fish = torch.randn(32, 6).abs() + 3
    catch = (fish.sum(1) * 20).half()
    weight = torch.nan_to_num(catch.square(), posinf=1.0).float()
    loss = (scales(fish).square().sum(1) * weight).mean() * 1e-6
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(market, f"loss {loss.item():.6f} heaviest {weight.max().item()}")
