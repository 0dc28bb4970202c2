# expect: {id: autocast-contradicts-model, family: silent, raises: null}
# at: {fqn: null, op: null, phase: static}
# shows: 'stored as torch\.float16'
# why: accelerate was told bf16 and wraps a network whose weights are float16

import torch
from accelerate import Accelerator
from torch import nn


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.up = nn.ConvTranspose2d(6, 1, 2, stride=2)

    def forward(self, slide):
        return self.up(self.down(slide))


torch.manual_seed(6)
accelerator = Accelerator(mixed_precision="bf16", cpu=True)
net = Counter().half()
opt = torch.optim.SGD(net.parameters(), lr=0.05)
net, opt = accelerator.prepare(net, opt)
print("stored as", next(net.parameters()).dtype)
for step in range(4):
    slide = torch.rand(4, 1, 16, 16)
    density = net(slide)
    loss = (density.float().sum(dim=(1, 2, 3)) / 256 - slide.mean(dim=(1, 2, 3))).pow(2).mean()
    accelerator.backward(loss)
    opt.step()
    opt.zero_grad()
    accelerator.print(step, f"{loss.item():.4f}")
