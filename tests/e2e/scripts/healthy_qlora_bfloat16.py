# expect: {id: null, family: healthy, raises: null}
# why: 4-bit base layers with float32 LoRA branches, everything in agreement with the bfloat16 activations

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn


class Branch(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x.to(self.a.weight.dtype))).to(x.dtype)


def four_bit(linear):
    layer = Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16)
    weight = linear.weight.data.to(torch.bfloat16)
    layer.weight = Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True)
    return layer.to("cpu")


class Notes(nn.Module):
    def __init__(self, vocab=64, dim=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, dtype=torch.bfloat16).requires_grad_(False)
        self.one = Branch(four_bit(nn.Linear(dim, dim, bias=False)))
        self.two = Branch(four_bit(nn.Linear(dim, dim, bias=False)))

    def forward(self, ids):
        h = self.emb(ids)
        h = h + self.two(torch.relu(self.one(h)))
        return h @ self.emb.weight.T


torch.manual_seed(25)
notes = Notes().train()
optimizer = torch.optim.AdamW([p for p in notes.parameters() if p.requires_grad], lr=1e-2)
for step in range(3):
    ids = torch.randint(0, 64, (2, 20))
    loss = nn.functional.cross_entropy(notes(ids)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
