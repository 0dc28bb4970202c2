# expect: {id: null, family: healthy, raises: null}
# why: readings and targets have NaN where a sensor was off; both are masked before anything is computed with them

import torch
from torch import nn


class Field(nn.Module):
    def __init__(self, sensors=9):
        super().__init__()
        self.fill = nn.Parameter(torch.zeros(sensors))
        self.model = nn.Sequential(nn.Linear(2 * sensors, 32), nn.SiLU(), nn.Linear(32, 2))

    def forward(self, readings):
        off = readings.isnan()
        readings = torch.where(off, self.fill, readings)
        return self.model(torch.cat([readings, off.to(readings.dtype)], dim=-1))


torch.manual_seed(13)
field = Field()
optimizer = torch.optim.Adam(field.parameters(), lr=1e-3)
for week in range(6):
    readings, harvest = torch.randn(30, 9), torch.randn(30, 2)
    readings[torch.rand(30, 9) < 0.2] = float("nan")
    harvest[torch.rand(30, 2) < 0.1] = float("nan")
    known = ~harvest.isnan()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        guess = field(readings)
    loss = (guess[known].float() - harvest[known]).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(week, loss.item())
