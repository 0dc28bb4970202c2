# expect: {id: fully-masked-row, family: nonfinite, raises: null}
# at: {fqn: cross, op: aten._softmax.default, phase: forward, step: 1}
# why: key_padding_mask excludes every key of one sample

import torch
from torch import nn


class Queries(nn.Module):
    def __init__(self, dim=32, count=6):
        super().__init__()
        self.slots = nn.Parameter(torch.randn(count, dim))
        self.cross = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.boxes = nn.Linear(dim, 4)

    def forward(self, regions, absent):
        slots = self.slots.expand(len(regions), -1, -1)
        found, weight = self.cross(slots, regions, regions, key_padding_mask=absent)
        return self.boxes(found).sigmoid(), weight


torch.manual_seed(11)
net = Queries()
opt = torch.optim.AdamW(net.parameters(), lr=1e-4)
counts = torch.tensor([7, 3, 0])
for step in range(2):
    regions = torch.randn(3, 7, 32)
    absent = torch.arange(7)[None] >= counts[:, None]
    boxes, _ = net(regions, absent)
    loss = nn.functional.l1_loss(boxes, torch.rand(3, 6, 4))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, "l1", loss.item())
