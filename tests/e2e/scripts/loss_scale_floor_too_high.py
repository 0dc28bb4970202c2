# expect: {id: loss-scale-exhausted, family: scaling, raises: null}
# at: {op: null, step: 1}
# shows: 'steps taken 0 of 8'
# why: a floor keeps the scale where the float16 backward always leaves its range, so every step is skipped

import torch
from torch import nn

FLOOR = 2.0**16


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.see = nn.Linear(20, 64)
        self.act = nn.Linear(64, 5)

    def forward(self, state):
        return self.act(torch.relu(self.see(state)))


torch.manual_seed(1)
policy = Policy()
optimizer = torch.optim.SGD(policy.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=FLOOR)
taken = 0
for episode in range(8):
    state, prize = torch.randn(32, 20), torch.randn(32) * 30
    with torch.autocast("cpu", dtype=torch.float16):
        scores = policy(state)
    chance = scores.float().log_softmax(-1)
    loss = -(chance.amax(-1) * prize).sum()
    before = policy.act.bias.detach().clone()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update(max(scaler.get_scale(), FLOOR))
    optimizer.zero_grad()
    taken += int(not torch.equal(before, policy.act.bias))
    print(f"episode {episode} loss {loss.item():.2f} scale {scaler.get_scale():.0f}")
print("steps taken", taken, "of 8")
