# expect: {id: operand-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: body, op: aten.addmm.default, phase: forward, step: 1, raised_in: out}
# born: fsdp-output
# born_fqn: body
# why: the shard policy's output_dtype makes the inner unit hand float32 to a bfloat16 layer outside it

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Summary(nn.Module):
    def __init__(self, vocab=60, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.body = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.out(self.body(self.emb(ids)))


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(1)
net = Summary().to(torch.bfloat16)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
fully_shard(net.body, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(2):
    ids = torch.randint(0, 60, (2, 16))
    loss = nn.functional.cross_entropy(net(ids).flatten(0, 1).float(), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
dist.destroy_process_group()
