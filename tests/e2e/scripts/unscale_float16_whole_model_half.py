# expect: {id: unscale-float16-gradients, family: scaling, raises: ValueError}
# at: {fqn: [null, '', c1, head], op: null, phase: [optimizer, static], step: 1}
# why: the whole network was halved, so the scaler would have to unscale float16 gradients

import torch
from torch import nn


class Digits(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 8, 5, stride=2)
        self.head = nn.Linear(8 * 12 * 12, 10)

    def forward(self, x):
        return self.head(torch.relu(self.c1(x)).flatten(1))


torch.manual_seed(0)
net = Digits().half()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(3):
    x, y = torch.rand(16, 1, 28, 28), torch.randint(0, 10, (16,))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(net(x).float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(step, loss.item())
