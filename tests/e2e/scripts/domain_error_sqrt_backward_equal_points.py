# expect: {id: domain-error, family: nonfinite, raises: null}
# at: {fqn: '', op: [aten.div.Tensor, aten.mul.Tensor], phase: backward, step: 1}
# why: the square root's derivative at zero is inf for a pair of equal points; the forward is finite

import torch
from torch import nn


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.place = nn.Linear(3, 8)

    def forward(self, a, b):
        d = self.place(a) - self.place(b)
        return d.square().sum(-1).sqrt()


torch.manual_seed(1)
pairs = Pairs()
opt = torch.optim.SGD(pairs.parameters(), lr=0.01)
a = torch.randn(10, 3)
b = a + torch.randn(10, 3)
b[4] = a[4]
for step in range(2):
    far = pairs(a, b)
    loss = nn.functional.mse_loss(far, (a - b).norm(dim=-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
