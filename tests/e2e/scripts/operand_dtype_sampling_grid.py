# expect: {id: operand-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: straighten, op: aten.grid_sampler_2d.default, phase: forward, step: 1, raised_in: straighten}
# why: the sampling grid is kept float32 "for accuracy" while the picture is bfloat16

import torch
from torch import nn
from torch.nn import functional as fn


class Straighten(nn.Module):
    def __init__(self):
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(1, 4, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.theta = nn.Linear(64, 6)
        nn.init.zeros_(self.theta.weight)
        self.theta.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1, 0]))

    def forward(self, image):
        theta = self.theta(self.look(image)).float().view(-1, 2, 3)
        grid = fn.affine_grid(theta, list(image.shape), align_corners=False)
        return fn.grid_sample(image, grid, align_corners=False)


class Signs(nn.Module):
    def __init__(self):
        super().__init__()
        self.straighten = Straighten()
        self.read = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 43))

    def forward(self, image):
        return self.read(self.straighten(image))


torch.manual_seed(2)
signs = Signs().bfloat16()
optimizer = torch.optim.SGD(signs.parameters(), lr=0.05)
for step in range(2):
    image, label = torch.rand(8, 1, 28, 28).bfloat16(), torch.randint(0, 43, (8,))
    loss = fn.cross_entropy(signs(image).float(), label)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
