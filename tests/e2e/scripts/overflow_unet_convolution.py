# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: up.1, op: aten.convolution.default, phase: forward, step: 1}
# why: the second decoder convolution of a small UNet produces numbers beyond 65504

import torch
from torch import nn


def pair(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.SiLU())


class MiniUNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.time = nn.Embedding(100, width)
        self.down = nn.ModuleList([pair(3, width), pair(width, 2 * width)])
        self.up = nn.ModuleList([nn.Conv2d(2 * width, width, 3, padding=1), nn.Conv2d(2 * width, width, 3, padding=1)])
        self.rgb = nn.Conv2d(width, 3, 1)

    def forward(self, x, t):
        a = self.down[0](x) + self.time(t)[:, :, None, None]
        b = self.down[1](nn.functional.avg_pool2d(a, 2))
        c = nn.functional.interpolate(self.up[0](b), scale_factor=2)
        return self.rgb(nn.functional.softsign(self.up[1](torch.cat([a, c], dim=1))))


torch.manual_seed(4)
unet = MiniUNet()
with torch.no_grad():
    unet.up[0].weight.mul_(2000)
    unet.up[1].weight.mul_(2000)
unet = unet.half().eval()
x = torch.randn(1, 3, 16, 16, dtype=torch.float16)
with torch.no_grad():
    for t in (60, 40, 20):
        x = x - 0.1 * unet(x, torch.tensor([t]))
        print(t, "spread", x.float().std().item())
