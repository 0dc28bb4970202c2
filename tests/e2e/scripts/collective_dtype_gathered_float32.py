# expect: {id: collective-dtype-mismatch, family: mismatch, raises: ValueError}
# at: {fqn: null, phase: forward, step: 1}
# why: the list that the scores are gathered into is float32, the scores are bfloat16

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(3)
scorer = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)).bfloat16()
answers = torch.randn(6, 16).bfloat16()
with torch.no_grad():
    scores = scorer(answers).flatten()
everybody = [torch.zeros(6) for _ in range(dist.get_world_size())]
dist.all_gather(everybody, scores)
print("best", torch.cat(everybody).argmax().item())
dist.destroy_process_group()
