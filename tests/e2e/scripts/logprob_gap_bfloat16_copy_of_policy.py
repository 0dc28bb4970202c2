# expect: {id: logprob-gap, family: silent, raises: null}
# at: {phase: [forward, generate]}
# shows: 'mean ratio (0\.9|1\.0)[0-9]*[1-9]'
# why: actions are drawn by a bfloat16 copy of the policy, their ratios are taken against float32 log-probabilities

import copy

import torch
from torch import nn


class Grid(nn.Module):
    def __init__(self, cells=49, moves=16):
        super().__init__()
        self.where = nn.Embedding(cells, 64)
        self.think = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.move = nn.Linear(128, moves)

    def forward(self, cell):
        return self.move(self.think(self.where(cell)))


torch.manual_seed(0)
policy = Grid()
nn.init.normal_(policy.move.weight, std=0.8)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
for update in range(3):
    actor = copy.deepcopy(policy).to(torch.bfloat16)
    cells = torch.randint(0, 49, (256,))
    with torch.no_grad():
        old = actor(cells).log_softmax(-1)
        moves = torch.multinomial(old.float().exp(), 1)
        old = old.gather(1, moves).float()
    new = policy(cells).log_softmax(-1).gather(1, moves)
    ratio = (new - old).exp()
    gain = torch.randn_like(ratio)
    loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(update, f"mean ratio {ratio.mean().item():.5f} largest {ratio.max().item():.3f}")
