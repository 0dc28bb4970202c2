# expect: {id: norm-square-overflow, family: nonfinite, raises: null}
# at: {fqn: '', op: aten.linalg_vector_norm.default, phase: forward, step: 1}
# shows: 'best match 0\.000'
# why: the length of a float16 vector is itself beyond 65504, so normalising gives zero vectors and a zero similarity

import torch
from torch import nn


class Matcher(nn.Module):
    def __init__(self, bins=128, dim=64):
        super().__init__()
        self.project = nn.Linear(bins, dim, bias=False)

    def forward(self, song):
        return nn.functional.normalize(self.project(song), dim=-1)


torch.manual_seed(4)
matcher = Matcher().to(torch.float16).eval()
library = (torch.rand(20, 128) * 40000).half() * torch.sign(torch.randn(20, 128)).half()
query = library[3:4] * 0.9
with torch.no_grad():
    near = matcher(query) @ matcher(library).T
print(f"best match {near.max().item():.3f} at {near.argmax().item()}")
