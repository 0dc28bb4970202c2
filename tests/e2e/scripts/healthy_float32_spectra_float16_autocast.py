# expect: {id: null, family: healthy, raises: null}
# why: float32 spectra with a log of clamped magnitudes, weights of one under a float16 autocast region with a scaler

import torch
from torch import nn


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.window = nn.Parameter(torch.hann_window(32), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(17))
        self.bell = nn.Linear(17, 4)

    def forward(self, sound):
        with torch.autocast("cpu", enabled=False):
            frames = sound.unfold(-1, 32, 16) * self.window
            loud = torch.log(torch.fft.rfft(frames).abs().clamp(min=1e-6))
        return self.bell(loud * self.scale).mean(1)


torch.manual_seed(36)
tower = Tower()
optimizer = torch.optim.Adam([p for p in tower.parameters() if p.requires_grad], lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
for hour in range(6):
    sound, which = torch.randn(8, 160), torch.randint(4, (8,))
    sound[0] = 0.0
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(tower(sound), which)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(hour, loss.item())
