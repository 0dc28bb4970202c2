# expect: {id: null, family: healthy, raises: null}
# why: bfloat16 experts whose router computes in float32, so the choice does not depend on rounding

import torch
from torch import nn


class Steady(nn.Module):
    def __init__(self, dim=32, count=8, top=2):
        super().__init__()
        self.top = top
        self.choose = nn.Parameter(torch.randn(count, dim) * 0.2)
        self.w_in = nn.Parameter(torch.randn(count, dim, 2 * dim) * 0.1)
        self.w_out = nn.Parameter(torch.randn(count, 2 * dim, dim) * 0.1)

    def forward(self, x):
        scores = x.float() @ self.choose.float().T
        share, chosen = scores.softmax(-1).topk(self.top, -1)
        inner = torch.relu(torch.einsum("nd,nkdh->nkh", x, self.w_in[chosen]))
        outer = torch.einsum("nkh,nkhd->nkd", inner, self.w_out[chosen])
        return (outer * share.to(x.dtype).unsqueeze(-1)).sum(1)


class Board(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(100, 32)
        self.steady = Steady()
        self.vote = nn.Linear(32, 3)

    def forward(self, ids):
        h = self.emb(ids)
        return self.vote(h + self.steady(h))


torch.manual_seed(17)
board = Board().to(torch.bfloat16).eval()
with torch.no_grad():
    votes = board(torch.randint(0, 100, (300,)))
print("votes", votes.argmax(-1).bincount(minlength=3).tolist())
