# expect: {id: scaler-bfloat16, family: scaling, raises: null}
# at: {fqn: null, op: null, phase: static}
# shows: 'torch\.bfloat16 scale 65536'
# why: a scaler over bfloat16 trainables does nothing useful here and raises on CUDA

import torch
from torch import nn

torch.manual_seed(27)
soil = torch.randn(200, 10)
tonnes = soil @ torch.randn(10, 1) + 4

net = nn.Sequential(nn.Linear(10, 40), nn.SiLU(), nn.Linear(40, 1)).to(torch.bfloat16)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
for epoch in range(6):
    order = torch.randperm(200)
    for rows in order.split(50):
        optimizer.zero_grad()
        guess = net(soil[rows].bfloat16())
        loss = nn.functional.smooth_l1_loss(guess.float(), tonnes[rows])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    kind = next(net.parameters()).dtype
    print(f"{epoch}: {loss.item():.3f} {kind} scale {scaler.get_scale():.0f}")
