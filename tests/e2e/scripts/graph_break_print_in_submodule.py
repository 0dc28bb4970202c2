# expect: {id: compile-graph-break, family: compile-load, raises: null}
# at: {fqn: ['', colour], op: null, phase: compile}
# why: a print inside a compiled submodule

import torch
from torch import nn


class Colour(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv2d(3, 3, 1)
        self.seen = 0

    def forward(self, x):
        y = self.mix(x)
        if self.training:
            print("mean tone", tuple(y.shape))
        return torch.sigmoid(y)


class Album(nn.Module):
    def __init__(self):
        super().__init__()
        self.colour = Colour()
        self.sort = nn.Linear(3, 2)

    def forward(self, x):
        return self.sort(self.colour(x).mean(dim=(2, 3)))


torch.manual_seed(1)
album = torch.compile(Album(), backend="eager")
opt = torch.optim.Adam(album.parameters(), lr=1e-3)
for page in range(2):
    photo, keep = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 1, 0])
    loss = nn.functional.cross_entropy(album(photo), keep)
    loss.backward()
    opt.step()
    opt.zero_grad()
    print("page", page, loss.item())
