# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: null, op: aten._to_copy.default, phase: forward, step: 1}
# why: undiscounted returns above 65504 are stored as float16 outside any module

import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, state):
        return self.layers(state).squeeze(-1)


def collect(length=200):
    states = torch.randn(length, 6)
    rewards = 500 + 50 * torch.randn(length)
    to_go = rewards.flip(0).cumsum(0).flip(0)
    return states, to_go.to(torch.float16)


torch.manual_seed(9)
critic = Critic()
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
for rollout in range(3):
    states, to_go = collect()
    loss = nn.functional.mse_loss(critic(states), to_go.float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("rollout", rollout, "critic loss", loss.item())
