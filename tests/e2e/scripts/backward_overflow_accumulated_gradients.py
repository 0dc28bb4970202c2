# expect: {id: backward-overflow, family: nonfinite, raises: null}
# at: {fqn: [outer, null], op: aten.add_.Tensor, phase: backward, step: 1}
# shows: "largest gradient inf"
# why: eight backward passes add up in float16 gradients; each part is finite, their sum is not

import torch
from torch import nn

torch.manual_seed(0)


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 1)

    def forward(self, items):
        return self.outer(self.inner(items))


counter = Counter().half()
optimizer = torch.optim.SGD(counter.parameters(), lr=1e-6)

for _ in range(2):
    for _ in range(8):
        items = torch.rand(8, 4).half() + 1
        loss = counter(items).float().sum() * 1000
        loss.backward()
    largest = max(parameter.grad.abs().max().item() for parameter in counter.parameters())
    print(loss.item(), "largest gradient", largest)
    optimizer.step()
    optimizer.zero_grad()
