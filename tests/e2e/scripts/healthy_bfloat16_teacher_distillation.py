# expect: {id: null, family: healthy, raises: null}
# why: a float32 student learns from a frozen bfloat16 teacher with other weights; their difference is the point

import torch
from torch import nn


class Sorter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(12, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 5))

    def forward(self, x):
        return self.inner(x)


torch.manual_seed(35)
teacher, student = Sorter(48).to(torch.bfloat16).eval(), Sorter(16)
optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
for lesson in range(6):
    x = torch.randn(64, 12)
    with torch.no_grad():
        wanted = teacher(x.bfloat16()).float().log_softmax(-1)
    loss = nn.functional.kl_div(student(x).log_softmax(-1), wanted, log_target=True, reduction="batchmean")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(lesson, loss.item())
