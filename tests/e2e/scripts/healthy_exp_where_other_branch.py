# expect: {id: null, family: healthy, raises: null}
# why: exp leaves float16's range where torch.where takes the other branch, in inference only

import torch
from torch import nn


class Softly(nn.Module):
    def forward(self, x):
        return torch.where(x > 10, x, torch.log1p(torch.exp(x)))


torch.manual_seed(7)
stairs = nn.Sequential(nn.Linear(8, 32), Softly(), nn.Linear(32, 16), Softly(), nn.Linear(16, 2))
with torch.no_grad():
    stairs[0].weight.mul_(12)
stairs = stairs.half().eval()
with torch.inference_mode():
    for floor in range(4):
        height = stairs(torch.randn(32, 8).half())
        print(floor, height.float().mean(0).tolist())
