# expect: {id: null, family: healthy, raises: null}
# why: evaluation leaves early and some modules never run; a checkpoint of zeros is read by nobody

import torch
from torch import nn


class Exits(nn.Module):
    def __init__(self, dim=20, depth=5):
        super().__init__()
        self.stem = nn.Linear(8, dim)
        self.steps = nn.ModuleList([nn.Sequential(nn.Linear(dim, dim), nn.GELU()) for _ in range(depth)])
        self.doors = nn.ModuleList([nn.Linear(dim, 3) for _ in range(depth)])

    def forward(self, x, sure=None):
        x = self.stem(x)
        said = []
        for step, door in zip(self.steps, self.doors, strict=True):
            x = x + step(x)
            said.append(door(x))
            if sure is not None and said[-1].softmax(-1).amax(-1).min() > sure:
                break
        return said


torch.manual_seed(11)
exits = Exits()
opt = torch.optim.Adam(exits.parameters(), lr=3e-3)
for epoch in range(4):
    exits.train()
    x = torch.randn(64, 8)
    y = x[:, :3].argmax(-1)
    loss = sum(nn.functional.cross_entropy(logits, y) for logits in exits(x))
    opt.zero_grad()
    loss.backward()
    opt.step()
    exits.eval()
    with torch.no_grad():
        said = exits(x[:16], sure=0.34)
    print(epoch, loss.item(), "left after", len(said))
