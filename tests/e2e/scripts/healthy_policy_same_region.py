# expect: {id: null, family: healthy, raises: null}
# why: a policy acts and is trained in the same bfloat16 autocast region; its ratios are 1 until it is trained

import torch
from torch import nn


class Robot(nn.Module):
    def __init__(self, sensors=24, commands=256):
        super().__init__()
        self.sense = nn.Sequential(nn.Linear(sensors, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        self.command = nn.Linear(128, commands)
        self.worth = nn.Linear(128, 1)

    def forward(self, reading):
        felt = self.sense(reading)
        return self.command(felt), self.worth(felt).squeeze(-1)


torch.manual_seed(9)
robot = Robot()
nn.init.normal_(robot.command.weight, std=1.5)
optimizer = torch.optim.Adam(robot.parameters(), lr=3e-4)
for shift in range(2):
    readings = torch.randn(512, 24)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        scores, worth = robot(readings)
    drawn = torch.distributions.Categorical(logits=scores.float())
    commands = drawn.sample()
    noted = drawn.log_prob(commands)
    gain = torch.randn(512) - worth.float()
    for epoch in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores, worth = robot(readings)
        now = torch.distributions.Categorical(logits=scores.float()).log_prob(commands)
        ratio = torch.exp(now - noted)
        held = torch.clamp(ratio, 0.98, 1.02)
        loss = -torch.min(ratio * gain, held * gain).mean() + 0.5 * (worth.float() - gain).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(shift, epoch, "clipped", int((ratio != held).sum()), f"loss {loss.item():.4f}")
