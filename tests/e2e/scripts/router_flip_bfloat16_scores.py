# expect: {id: router-flip, family: silent, raises: null}
# at: {fqn: [mix, mix.which], phase: forward, step: 1}
# shows: 'chosen otherwise [1-9]'
# why: the choice of experts is made from bfloat16 scores and differs from float32's for a few percent of tokens

import torch
from torch import nn


class Mix(nn.Module):
    def __init__(self, dim=64, count=64, top=8):
        super().__init__()
        self.top = top
        self.which = nn.Linear(dim, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, dim, dim) / dim**0.5)

    def forward(self, x):
        share, chosen = self.which(x).softmax(-1).topk(self.top, dim=-1)
        y = torch.einsum("nd,nkde->nke", x, self.up[chosen])
        return (torch.relu(y) * share.unsqueeze(-1)).sum(1)


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(512, 64)
        self.mix = Mix()
        self.out = nn.Linear(64, 4)

    def forward(self, ids):
        return self.out(self.mix(self.emb(ids)))


torch.manual_seed(7)
shift = Shift().to(torch.bfloat16).eval()
ids = torch.arange(512)
with torch.no_grad():
    labels = shift(ids).argmax(-1)
    x = shift.emb(ids)
    rough = shift.mix.which(x).topk(8, -1).indices.sort(-1).values
    fine = (x.float() @ shift.mix.which.weight.float().T).topk(8, -1).indices.sort(-1).values
print("labels", labels.bincount().tolist(), "chosen otherwise", int((rough != fine).any(-1).sum()))
