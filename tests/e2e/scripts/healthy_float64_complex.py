# expect: {id: null, family: healthy, raises: null}
# why: a float64 model on numpy data, with complex numbers inside; everything agrees

import numpy as np
import torch
from torch import nn


class Spectral(nn.Module):
    def __init__(self, modes):
        super().__init__()
        self.modes = modes
        self.real = nn.Parameter(torch.randn(modes, dtype=torch.float64) * 0.3)
        self.imag = nn.Parameter(torch.randn(modes, dtype=torch.float64) * 0.3)

    def forward(self, x):
        f = torch.fft.rfft(x)
        kept = f[..., : self.modes] * torch.complex(self.real, self.imag)
        return torch.fft.irfft(nn.functional.pad(kept, (0, f.shape[-1] - self.modes)), n=x.shape[-1])


torch.manual_seed(27)
t = np.linspace(0, 4 * np.pi, 64)
orbit = torch.from_numpy(np.stack([np.cos(t + phase) for phase in range(6)]))
model = nn.Sequential(Spectral(8), nn.Linear(64, 64).double(), nn.Tanh(), Spectral(8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(10):
    loss = (model(orbit) - orbit.roll(1, -1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(step, loss.item())
