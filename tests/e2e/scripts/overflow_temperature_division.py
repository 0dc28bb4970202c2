# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: '', op: aten.div.Tensor, phase: forward, step: 2}
# why: after one step the learnt temperature has dropped so far that similarity over temperature leaves float16

import torch
from torch import nn


class Twins(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 16))
        self.temperature = nn.Parameter(torch.tensor(0.05))

    def forward(self, left, right):
        a = nn.functional.normalize(self.net(left), dim=-1)
        b = nn.functional.normalize(self.net(right), dim=-1)
        return a @ b.T / self.temperature.clamp_min(1e-5).to(a.dtype)


torch.manual_seed(6)
twins = Twins()
opt = torch.optim.SGD([{"params": twins.net.parameters(), "lr": 1e-3}, {"params": [twins.temperature], "lr": 0.1}])
for step in range(3):
    left = torch.rand(8, 3, 8, 8)
    right = left + 0.05 * torch.rand_like(left)
    with torch.autocast("cpu", dtype=torch.float16):
        scores = twins(left, right)
    loss = nn.functional.cross_entropy(scores.float(), torch.arange(8))
    opt.zero_grad()
    loss.backward()
    opt.step()
    twins.temperature.data.clamp_(max=0.05)
    print(step, loss.item(), twins.temperature.item())
