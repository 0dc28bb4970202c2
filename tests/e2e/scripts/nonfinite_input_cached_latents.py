# expect: {id: nonfinite-input, family: nonfinite, raises: null}
# at: {fqn: ['', net, net.0], op: null, phase: forward, step: 2}
# why: latents that were written to disk earlier contain inf; numpy made them, no torch op did

import numpy as np
import torch
from torch import nn


def read(path):
    return torch.from_numpy(np.load(path)).float()


rng = np.random.default_rng(1)
for number in range(3):
    latents = rng.normal(0, 1, size=(8, 4, 8, 8)).astype(np.float32)
    if number == 1:
        latents[3, 0] *= 1e6
    with np.errstate(over="ignore"):
        np.save(f"latents{number}.npy", latents.astype(np.float16))


class Prior(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 4, 3, padding=1))

    def forward(self, x):
        return self.net(x)


torch.manual_seed(1)
prior = Prior()
opt = torch.optim.AdamW(prior.parameters(), lr=2e-3)
for number in range(3):
    z = read(f"latents{number}.npy")
    loss = nn.functional.mse_loss(prior(z + 0.3 * torch.randn_like(z)), z)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print("file", number, "loss", loss.item())
