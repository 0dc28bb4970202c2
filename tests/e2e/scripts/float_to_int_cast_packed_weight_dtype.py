# expect: {id: float-to-int-cast, family: silent, raises: null}
# at: {fqn: steps.0, op: aten._to_copy.default, phase: forward, step: 1}
# shows: 'distinct inputs [1-9]\b'
# why: the wrapper casts activations to the dtype of a packed 4-bit weight, which is uint8

import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn


class Adapted(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.a = nn.Linear(64, rank, bias=False)
        self.b = nn.Linear(rank, 64, bias=False)
        self.distinct = 0

    def forward(self, x):
        h = x.to(self.base.weight.dtype).to(x.dtype)
        self.distinct = h.unique().numel()
        return self.base(h) + self.b(self.a(x))


def small(weight):
    layer = Linear4bit(64, 64, bias=False, quant_type="nf4", compute_dtype=torch.float32)
    layer.weight = Params4bit(weight, requires_grad=False, quant_type="nf4")
    return layer.to("cpu")


torch.manual_seed(2)
tutor = nn.Module()
tutor = nn.Sequential()
tutor.emb = nn.Embedding(50, 64)
tutor.steps = nn.Sequential(Adapted(small(torch.randn(64, 64) / 8)), nn.ReLU(), nn.Linear(64, 50))
opt = torch.optim.AdamW([p for p in tutor.parameters() if p.requires_grad], lr=1e-3)
for lesson in range(3):
    ids, nxt = torch.randint(0, 50, (32,)), torch.randint(0, 50, (32,))
    loss = nn.functional.cross_entropy(tutor(ids), nxt)
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(lesson, f"loss {loss.item():.3f} distinct inputs {tutor.steps[0].distinct}")
