# expect: {id: float-to-int-cast, family: silent, raises: null}
# at: {fqn: place, op: aten._to_copy.default, phase: forward, step: 1}
# shows: 'distinct heights (2\d|3[0-2])\b'
# why: normalised coordinates take the dtype of the tile index, an int64, before the table is interpolated

import torch
from torch import nn


class Place(nn.Module):
    def __init__(self, cells=32, dim=8):
        super().__init__()
        self.cells = cells
        self.table = nn.Parameter(torch.randn(cells + 1, dim) * 0.1)

    def forward(self, x):
        tile = (x * self.cells).floor().long().clamp(0, self.cells - 1)
        inside = (x * self.cells - tile).to(tile.dtype).unsqueeze(-1)
        return self.table[tile] * (1 - inside) + self.table[tile + 1] * inside


class Map(nn.Module):
    def __init__(self):
        super().__init__()
        self.place = Place()
        self.read = nn.Linear(8, 1)

    def forward(self, x):
        return self.read(self.place(x)).squeeze(-1)


torch.manual_seed(0)
chart = Map()
optimizer = torch.optim.Adam(chart.parameters(), lr=1e-2)
for _ in range(30):
    x = torch.rand(256)
    height = torch.sin(6 * x)
    loss = (chart(x) - height).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f} distinct heights {chart(torch.rand(1000)).unique().numel()}")
