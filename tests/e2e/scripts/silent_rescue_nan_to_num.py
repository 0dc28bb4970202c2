# expect: {id: silent-rescue, family: silent, raises: null}
# at: {fqn: ff, op: [aten.nan_to_num.default, aten.mul.Tensor], phase: forward, step: 1}
# shows: 'loss [0-9.]+$'
# why: nan_to_num puts zeros where a float16 product overflowed, and training goes on without these elements

import torch
from torch import nn


class Tidy(nn.Module):
    def __init__(self, dim, wide):
        super().__init__()
        self.gate, self.up = nn.Linear(dim, wide), nn.Linear(dim, wide)
        self.down = nn.Linear(wide, dim)

    def forward(self, x):
        inner = torch.nn.functional.gelu(self.gate(x)) * self.up(x)
        inner = torch.nan_to_num(inner, nan=0.0, posinf=0.0, neginf=0.0)
        return self.down(inner)


class Classifier(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.ff = Tidy(dim, 48)
        self.out = nn.Linear(dim, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.ff(self.norm(x)) / 1e4))


torch.manual_seed(9)
clf = Classifier()
with torch.no_grad():
    clf.ff.gate.weight.mul_(500)
    clf.ff.up.weight.mul_(500)
clf.half()
optimizer = torch.optim.SGD(clf.parameters(), lr=1e-3)
for step in range(3):
    x, y = torch.randn(16, 24).half(), torch.randint(0, 3, (16,))
    loss = nn.functional.cross_entropy(clf(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step} loss {loss.item():.4f}")
