# expect: {id: rounded-result, family: silent, raises: null}
# at: {fqn: [null, '1']}
# shows: "codes 1 float32 [2-9]"
# why: squared distances overflow float16, so that all are inf and the nearest code is always the first

import torch
from torch import nn


class Quantizer(nn.Module):
    def __init__(self, codes, dim):
        super().__init__()
        self.book = nn.Parameter(torch.randn(codes, dim) * 60)

    def forward(self, x):
        d = x[:, None] - self.book
        pick = (-(d * d).sum(-1)).argmax(-1)
        chosen = self.book[pick]
        return x + (chosen - x).detach(), chosen, pick


torch.manual_seed(0)
enc, vq, dec = nn.Linear(16, 64), Quantizer(8, 64), nn.Linear(64, 16)
with torch.no_grad():
    enc.weight.mul_(150)
net = nn.ModuleList([enc, vq]).half()
opt = torch.optim.SGD(dec.parameters(), lr=1e-6)
for step in range(4):
    x = torch.randn(32, 16)
    with torch.no_grad():
        z, chosen, pick = vq(enc(x.half()))
        exact = (enc(x.half()).float()[:, None] - vq.book.float()).pow(2).sum(-1).argmin(-1)
    loss = (dec(z.float()) - x).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(
        step, "codes", pick.unique().numel(), "float32", exact.unique().numel(), "wrong", (pick != exact).sum().item()
    )
