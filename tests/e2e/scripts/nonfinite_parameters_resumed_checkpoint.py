# expect: {id: nonfinite-parameters, family: nonfinite, raises: null}
# at: {fqn: mid.1, op: null, phase: [static, forward], step: 1}
# why: the weights that are loaded hold NaN in one layer, from an earlier run

import io

import torch
from torch import nn


class Resumed(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Linear(12, 20)
        self.mid = nn.ModuleList([nn.Linear(20, 20) for _ in range(3)])
        self.end = nn.Linear(20, 1)

    def forward(self, x):
        x = self.front(x)
        for layer in self.mid:
            x = x + torch.relu(layer(x))
        return self.end(x)


def earlier_run():
    net = Resumed()
    net.mid[1].bias.data = torch.tensor([float("nan")] + [0.1] * 19)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    return file


torch.manual_seed(3)
net = Resumed()
net.load_state_dict(torch.load(earlier_run()))
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(2):
    x = torch.randn(16, 12)
    loss = nn.functional.mse_loss(net(x), x.sum(-1, keepdim=True))
    opt.zero_grad()
    loss.backward()
    opt.step()
    print("step", step, "loss", loss.item())
