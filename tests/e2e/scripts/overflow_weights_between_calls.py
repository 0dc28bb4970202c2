# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: null, op: aten.add_.Tensor, phase: forward, step: 4}
# shows: "3 inf"
# why: a float16 teacher is the sum of its students instead of their mean; its bias overflows between two calls

import copy

import torch
from torch import nn

torch.manual_seed(0)
student = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
student[1].bias.data.fill_(2e4)
teacher = copy.deepcopy(student).half().requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=1e-6)

for lesson in range(5):
    x = torch.randn(4, 6)
    with torch.no_grad():
        target = teacher(x.half()).float()
    loss = (student(x) - target).pow(2).mean() * 1e-9
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
            old.add_(new.half())
    print(lesson, loss.item())
