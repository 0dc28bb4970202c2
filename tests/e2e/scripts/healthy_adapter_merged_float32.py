# expect: {id: null, family: healthy, raises: null}
# why: the weights are cast to float32 before the adapter is added to them

import torch
from torch import nn


class Bell(nn.Module):
    def __init__(self, width=32, rank=2):
        super().__init__()
        self.cast = nn.Linear(width, width, bias=False).bfloat16().requires_grad_(False)
        nn.init.uniform_(self.cast.weight, 0.6, 1.0)
        self.down = nn.Parameter(torch.randn(rank, width) * 0.05)
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, struck):
        return self.cast(struck.to(self.cast.weight.dtype)).float() + struck @ self.down.T @ self.up.T


torch.manual_seed(44)
bell = Bell()
optimizer = torch.optim.AdamW([bell.down, bell.up], lr=1e-3)
for _ in range(6):
    struck = torch.randn(16, 32)
    loss = bell(struck).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    was = bell.cast.weight.clone()
    bell.cast.float().weight += bell.up @ bell.down
    bell.up.zero_()
    tone = bell(torch.randn(4, 32)).mean()
print(f"tone {tone.item():.3f} moved {int((bell.cast.weight != was).sum())} of 1024")
