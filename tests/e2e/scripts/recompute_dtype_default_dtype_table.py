# expect: {id: recompute-dtype-mismatch, family: mismatch, raises: CheckpointError}
# at: {fqn: stages.1, phase: recompute, step: 1}
# why: the position table takes torch's default dtype, bfloat16 around the forward only, so the recompute saves float32

import contextlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@contextlib.contextmanager
def default(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


class Stage(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.lin = nn.Linear(dim, dim)

    def forward(self, x):
        steps = torch.linspace(0, 1, x.shape[1])
        wave = torch.sin(steps[:, None] * torch.arange(1, x.shape[2] + 1))
        return x + torch.tanh(self.lin(x)) * wave


class Genome(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.bases = nn.Embedding(5, dim)
        self.stages = nn.ModuleList([Stage(dim) for _ in range(2)])
        self.gene = nn.Linear(dim, 2)

    def forward(self, seq):
        h = self.bases(seq)
        for stage in self.stages:
            h = checkpoint(stage, h, use_reentrant=False)
        return self.gene(h.mean(1))


torch.manual_seed(0)
with default(torch.bfloat16):
    genome = Genome()
opt = torch.optim.SGD(genome.parameters(), lr=0.1)
for epoch in range(2):
    seq, has = torch.randint(0, 5, (4, 30)), torch.randint(0, 2, (4,))
    with default(torch.bfloat16):
        loss = nn.functional.cross_entropy(genome(seq), has)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(epoch, loss.item())
