# expect: {id: domain-error, family: nonfinite, raises: null}
# at: {fqn: middle, op: aten.div.Tensor, phase: forward, step: 1}
# why: the mean over an empty session is 0/0, in bfloat16 as in float32

import torch
from torch import nn


class Middle(nn.Module):
    def forward(self, x, keep):
        keep = keep.unsqueeze(-1).to(x.dtype)
        return (x * keep).sum(1) / keep.sum(1)


class Sessions(nn.Module):
    def __init__(self):
        super().__init__()
        self.page = nn.Embedding(60, 16)
        self.middle = Middle()
        self.buy = nn.Linear(16, 1)

    def forward(self, pages, keep):
        return self.buy(self.middle(self.page(pages), keep)).squeeze(-1)


torch.manual_seed(5)
sessions = Sessions().to(torch.bfloat16)
pages = torch.randint(0, 60, (5, 8))
keep = torch.arange(8)[None] < torch.tensor([[8], [3], [0], [5], [1]])
bought = torch.tensor([1.0, 0, 0, 1, 0])
optimizer = torch.optim.SGD(sessions.parameters(), lr=0.1)
loss = nn.functional.binary_cross_entropy_with_logits(sessions(pages, keep).float(), bought)
loss.backward()
optimizer.step()
print("loss", loss.item())
