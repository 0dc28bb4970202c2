# expect: {id: fsdp-mixed-dtypes, family: mismatch, raises: AssertionError}
# at: {fqn: ['', blocks.0], phase: [static, forward]}
# why: one shard unit holds bfloat16 linears and a float32 norm

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, dtype=torch.float32)
        self.lin = nn.Linear(dim, dim, dtype=torch.bfloat16)

    def forward(self, x):
        return x + self.lin(self.norm(x.float()).to(torch.bfloat16))


class Tagger(nn.Module):
    def __init__(self, dim=32, tags=7):
        super().__init__()
        self.words = nn.Embedding(100, dim, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(2)])
        self.tag = nn.Linear(dim, tags, dtype=torch.bfloat16)

    def forward(self, ids):
        h = self.words(ids)
        for block in self.blocks:
            h = block(h)
        return self.tag(h)


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(1)
tagger = Tagger()
mesh = init_device_mesh("cpu", (1,))
for block in tagger.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(tagger, mesh=mesh)
opt = torch.optim.AdamW(tagger.parameters(), lr=1e-3)
ids = torch.randint(0, 100, (4, 12))
loss = nn.functional.cross_entropy(tagger(ids).float().flatten(0, 1), torch.randint(0, 7, (48,)))
loss.backward()
opt.step()
print("loss", loss.item())
dist.destroy_process_group()
