# expect: {id: checkpoint-dtype-mismatch, family: compile-load, raises: null}
# at: {fqn: [null, ''], op: null, phase: static}
# shows: 'loss before [0-9.]+ after [0-9.]+ largest change [0-9.e-]*[1-9]'
# why: a float32 checkpoint is loaded into a bfloat16 model, which rounds its values, and the bfloat16 values are trained further

import io

import torch
from torch import nn
from torch.nn.functional import mse_loss


def field():
    return nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))


def season(plants, weather, grain, days, rate):
    optimizer = torch.optim.SGD(plants.parameters(), lr=rate, momentum=0.9)
    for _ in range(days):
        optimizer.zero_grad()
        loss = mse_loss(plants(weather).float(), grain)
        loss.backward()
        optimizer.step()
    return loss.item()


torch.manual_seed(21)
weather = torch.randn(96, 12)
grain = weather[:, :3].sin().sum(1, keepdim=True)
plants = field()
before = season(plants, weather, grain, 20, 0.05)
barn = io.BytesIO()
torch.save(plants.state_dict(), barn)
barn.seek(0)
again = field().to(torch.bfloat16)
again.load_state_dict(torch.load(barn))
kept = max((a - b.float()).abs().max().item() for a, b in zip(plants.parameters(), again.parameters(), strict=True))
after = season(again, weather.to(torch.bfloat16), grain, 6, 0.05)
print(f"loss before {before:.5f} after {after:.5f} largest change {kept:.2e}")
