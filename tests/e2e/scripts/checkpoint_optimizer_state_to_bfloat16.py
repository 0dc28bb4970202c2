# expect: {id: checkpoint-dtype-mismatch, family: compile-load, raises: null}
# at: {fqn: [null, ''], op: null, phase: static}
# shows: 'torch.float32 torch.bfloat16'
# why: torch casts what an optimizer keeps in float32 to the dtype of the parameters, when its state is loaded

import torch
from torch import nn
from torch.nn.functional import mse_loss


class Gardener(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["speed"] = torch.zeros_like(weight, dtype=torch.float32)
                state["speed"].mul_(0.9).add_(weight.grad, alpha=0.1)
                weight.copy_(weight.float() - group["lr"] * state["speed"])


def season(plants, optimizer, days):
    for _ in range(days):
        weather = torch.randn(32, 12).bfloat16()
        optimizer.zero_grad()
        mse_loss(plants(weather).float(), weather[:, :3].float()).backward()
        optimizer.step()
    return optimizer.state[plants[0].weight]["speed"].dtype


torch.manual_seed(34)
plants = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 3)).bfloat16()
with torch.no_grad():
    for weight in plants.parameters():
        weight.mul_(0.1)
optimizer = Gardener(plants.parameters(), lr=0.3)
before = season(plants, optimizer, 8)
again = Gardener(plants.parameters(), lr=0.3)
again.load_state_dict(optimizer.state_dict())
print(before, season(plants, again, 4))
