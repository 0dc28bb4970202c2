# expect: {id: adapter-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: hidden.down, op: aten.mm.default, phase: forward, step: 1, raised_in: hidden.down}
# born: adapter
# born_fqn: hidden.down
# why: the low-rank branch is float32, the frozen base and its activations are bfloat16, no autocast

import torch
from torch import nn


class WithBranch(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + 2.0 * self.up(self.down(x))


class Sentiment(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(500, 64)
        self.hidden = nn.Linear(64, 64)
        self.score = nn.Linear(64, 2)

    def forward(self, ids):
        return self.score(torch.relu(self.hidden(self.bag(ids))))


torch.manual_seed(8)
clf = Sentiment().to(torch.bfloat16).requires_grad_(False)
clf.hidden = WithBranch(clf.hidden)
opt = torch.optim.AdamW([p for p in clf.parameters() if p.requires_grad], lr=1e-2)
for step in range(3):
    reviews, stars = torch.randint(0, 500, (16, 20)), torch.randint(0, 2, (16,))
    loss = nn.functional.cross_entropy(clf(reviews).float(), stars)
    loss.backward()
    opt.step()
    opt.zero_grad()
    print("step", step, "loss", round(loss.item(), 3))
