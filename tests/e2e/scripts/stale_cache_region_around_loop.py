# expect: {id: stale-autocast-cache, family: silent, raises: null}
# at: {fqn: ['0', '2'], op: null, phase: forward, step: 2}
# shows: '(?s)0 loss (\S+)\n.*5 loss \1\n'
# why: one autocast region around the loop; its cached bfloat16 copies of the weights outlive optimizer.step

import torch
from torch import nn

torch.manual_seed(0)
swing = torch.linspace(-1, 1, 64)[:, None]
period = 1 + swing.square() / 16

fit = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(fit.parameters(), lr=0.3)
with torch.autocast("cpu", dtype=torch.bfloat16):
    for epoch in range(6):
        loss = nn.functional.mse_loss(fit(swing).float(), period)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(epoch, "loss", loss.item())
print("outside", nn.functional.mse_loss(fit(swing), period).item())
