# expect: {id: operand-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: mid, op: aten.mm.default, phase: forward, step: 1, raised_in: mid}
# why: a disabled region inside the bfloat16 one, and features cast to float32 meet a bfloat16 layer in it

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16).bfloat16()
        self.mid = nn.Linear(16, 16, bias=False).bfloat16()
        self.score = nn.Linear(16, 1)

    def forward(self, x):
        h = self.body(x)
        with torch.autocast("cpu", enabled=False):
            h = self.mid(h.float())
        return self.score(h)


torch.manual_seed(0)
net = Net()
with torch.autocast("cpu", dtype=torch.bfloat16):
    print(net(torch.randn(4, 8)))
