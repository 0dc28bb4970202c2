# expect: {id: null, family: healthy, raises: null}
# shows: 'using torch\.float32'
# why: the script tries a cheaper dtype, catches the refusal on purpose and goes on in float32

import torch
from torch import nn


class Estimator(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(7, 30)
        self.b = nn.Linear(30, 1)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def choose(net, sample):
    for dtype in (torch.float16, torch.bfloat16):
        net.a.to(dtype)
        try:
            net(sample)
        except RuntimeError as error:
            print(dtype, "refused:", str(error).splitlines()[0])
        else:
            return dtype
    net.float()
    return torch.float32


torch.manual_seed(14)
net = Estimator()
x = torch.randn(50, 7)
with torch.no_grad():
    print("using", choose(net, x[:1]))
opt = torch.optim.LBFGS(net.parameters(), max_iter=5)


def closure():
    opt.zero_grad()
    loss = (net(x).squeeze(-1) - x.sum(-1)).square().mean()
    loss.backward()
    return loss


for step in range(3):
    print(step, opt.step(closure).item())
