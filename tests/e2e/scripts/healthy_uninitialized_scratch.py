# expect: {id: null, family: healthy, raises: null}
# why: scratch memory comes uninitialised (here with NaN and inf in it), is written with out= and read only where written

import torch
from torch import nn


class Printer(nn.Module):
    def __init__(self, size=20):
        super().__init__()
        self.press = nn.Linear(size, size)
        self.ink = nn.Linear(size, 5)
        self.register_buffer("sheet", torch.full((64, size), float("nan")), persistent=False)
        self.sheet[::3] = float("inf")

    def forward(self, page):
        count = page.shape[0]
        torch.mm(page, self.press.weight.t(), out=self.sheet[:count])
        spare = torch.empty(count, 5)
        spare.fill_(float("nan"))
        spare.copy_(self.ink(torch.relu(self.sheet[:count])))
        return spare


torch.manual_seed(1)
printer = Printer().eval()
for day in range(5):
    with torch.no_grad():
        print(day, printer(torch.randn(8 + day, 20)).abs().mean().item())
