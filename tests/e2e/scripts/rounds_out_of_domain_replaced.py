# expect: {id: rounds-out-of-domain, family: nonfinite, raises: null}
# at: {fqn: null, op: aten.div.Tensor, phase: forward, step: 1}
# shows: 'weighted 0 of 32'
# why: squared distances of 5e-5 are 0 in float16, and what is divided by them becomes inf, which nan_to_num makes 0

import torch
from torch import nn

torch.manual_seed(41)
chart = nn.Linear(6, 2)
optimizer = torch.optim.SGD(chart.parameters(), lr=1e-2)
for voyage in range(4):
    harbor = torch.randn(32, 6)
    near = (harbor[:, 0] * 5e-5).half()
    weight = torch.nan_to_num(near.abs() / near.square(), posinf=0.0, neginf=0.0, nan=0.0).float()
    loss = (chart(harbor).square().sum(1) * (1 + weight)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(voyage, f"loss {loss.item():.3f} weighted {int((weight > 0).sum())} of 32")
