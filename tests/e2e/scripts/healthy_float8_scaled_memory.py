# expect: {id: null, family: healthy, raises: null}
# why: float8 with a scale for each row rounds to three bits and loses nothing else; so does a weight that lies in its range

import torch
from torch import nn

E4M3 = torch.float8_e4m3fn


class Memory(nn.Module):
    """Keeps the newest states in eight bits, each row with its scale, and its own weight in eight bits as well."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read = nn.Linear(width, width)
        self.register_buffer("frozen", (torch.randn(width, width) * 0.05).to(E4M3))

    def forward(self, x):
        small = x / x.shape[0] ** 2
        scale = torch.finfo(E4M3).max / small.detach().abs().amax(1, keepdim=True)
        packed = (small * scale).to(E4M3)
        return x + self.read(packed.float() / scale * x.shape[0] ** 2) + x @ self.frozen.float()


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(12)
        self.answer = nn.Linear(12, 1)

    def forward(self, x):
        return self.answer(self.memory(x))


torch.manual_seed(9)
keeper = Keeper()
optimizer = torch.optim.AdamW(keeper.parameters(), lr=1e-2)
for hour in range(4):
    tide = torch.rand(64, 12)
    loss = (keeper(tide) - tide.mean(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(hour, f"loss {loss.item():.4f}")
