# expect: {id: rounds-out-of-domain, family: nonfinite, raises: null}
# at: {fqn: '', op: aten.div.Tensor, phase: forward, step: 2}
# shows: nan
# why: the guard of 1e-8 is zero in float16, and the second batch has a ship at anchor, whose heading is divided by its length

import torch
from torch import nn


class Compass(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Linear(2, width, bias=False)
        self.head = nn.Linear(width, 4)

    def forward(self, velocity):
        heading = self.embed(velocity)
        length = heading.pow(2).sum(-1, keepdim=True).sqrt()
        return self.head(heading / (length + 1e-8))


torch.manual_seed(3)
compass = Compass().half()
with torch.inference_mode():
    for batch in range(3):
        velocity = torch.randn(16, 2)
        if batch == 1:
            velocity[5] = 0.0
        quarter = compass(velocity.half()).float().mean(0)
        print(batch, quarter.tolist())
