# expect: {id: null, family: healthy, raises: null}
# why: most embedding rows get a zero gradient because they were not looked up, not because anything was flushed

import torch
from torch import nn


class Species(nn.Module):
    def __init__(self, kinds=2000, dim=16):
        super().__init__()
        self.kind = nn.Embedding(kinds, dim)
        self.place = nn.Linear(2, dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, kind, where):
        return self.out(torch.relu(self.kind(kind) * self.place(where))).squeeze(-1)


torch.manual_seed(21)
species = Species()
optimizer = torch.optim.Adagrad(species.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for survey in range(5):
    kind, where = torch.randint(0, 2000, (32,)), torch.rand(32, 2)
    seen = torch.rand(32)
    with torch.autocast("cpu", dtype=torch.float16):
        guess = species(kind, where)
    loss = nn.functional.binary_cross_entropy_with_logits(guess.float(), seen)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(survey, loss.item())
