# expect: {id: buffer-promotes-to-float32, family: mismatch, raises: RuntimeError}
# at: {fqn: '', op: aten.convolution.default, phase: forward, step: 1, raised_in: second}
# born: buffer
# born_fqn: ""
# why: a per-channel gain registered after the cast is float32 and lifts the float16 feature maps

import torch
from torch import nn


class Constancy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.second = nn.Conv2d(6, 3, 3, padding=1, bias=False)

    def calibrate(self, grey):
        self.register_buffer("gain", 1 / grey.mean(dim=(0, 2, 3)).repeat(2).view(1, 6, 1, 1))

    def forward(self, photo):
        seen = torch.relu(self.first(photo)) * self.gain
        return torch.sigmoid(self.second(seen))


torch.manual_seed(18)
camera = Constancy().half().eval()
camera.calibrate(torch.rand(4, 3, 8, 8) + 0.5)
with torch.no_grad():
    fixed = camera(torch.rand(2, 3, 16, 16, dtype=torch.float16))
print("mean colour", fixed.float().mean(dim=(0, 2, 3)).tolist())
