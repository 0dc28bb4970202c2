# expect: {id: null, family: healthy, raises: null}
# why: small float16 inference with room to spare

from itertools import pairwise

import torch
from torch import nn


class Separable(nn.Module):
    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.depth = nn.Conv2d(c_in, c_in, 3, stride, 1, groups=c_in, bias=False)
        self.point = nn.Conv2d(c_in, c_out, 1, bias=False)
        self.norm = nn.BatchNorm2d(c_out)

    def forward(self, x):
        return nn.functional.hardswish(self.norm(self.point(self.depth(x))))


class Pocket(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        widths = [3, 8, 16, 24]
        self.body = nn.Sequential(*[Separable(a, b, 2) for a, b in pairwise(widths)])
        self.out = nn.Linear(24, classes)

    def forward(self, x):
        return self.out(nn.functional.adaptive_avg_pool2d(self.body(x), 1).flatten(1))


torch.manual_seed(15)
pocket = Pocket().half().eval()
with torch.inference_mode():
    for batch in torch.rand(3, 4, 3, 32, 32).half():
        p, label = pocket(batch).float().softmax(-1).max(-1)
        print(label.tolist(), [round(v, 3) for v in p.tolist()])
