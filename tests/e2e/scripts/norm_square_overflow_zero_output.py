# expect: {id: norm-square-overflow, family: nonfinite, raises: null}
# at: {fqn: enter.1, op: aten.pow.Tensor_Scalar, phase: forward, step: 1}
# shows: 'spread 0\.0+'
# why: squares above 65504 become inf in float16, the reciprocal root 0, and the norm's output all zeros, still finite

import torch
from torch import nn


class RootMean(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + 1e-5) * self.w


class Stocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(5, 32, bias=False), RootMean(32))
        self.read = nn.Linear(32, 1)

    def forward(self, prices):
        h = self.enter(prices)
        return self.read(torch.tanh(h)), h


torch.manual_seed(1)
stocks = Stocks().to(torch.float16)
prices = (2000 + 200 * torch.randn(16, 5)).half()
with torch.no_grad():
    guess, h = stocks(prices)
print("guess", guess.float().mean().item(), "spread", f"{h.float().std().item():.6f}")
