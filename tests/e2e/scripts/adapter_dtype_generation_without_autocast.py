# expect: {id: adapter-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: body.0.low, op: aten.mm.default, phase: forward, step: 4, raised_in: body.0.low}
# born: adapter
# born_fqn: body.0.low
# why: training runs under bfloat16 autocast, the answers between two epochs do not, and the float32 branches refuse

import torch
from torch import nn


class Patched(nn.Module):
    def __init__(self, size, rank=4):
        super().__init__()
        self.wide = nn.Linear(size, size).to(torch.bfloat16).requires_grad_(False)
        self.low = nn.Linear(size, rank, bias=False)
        self.high = nn.Linear(rank, size, bias=False)

    def forward(self, x):
        return torch.relu(self.wide(x) + self.high(self.low(x)))


class Student(nn.Module):
    def __init__(self, words=30, size=32):
        super().__init__()
        self.words = nn.Embedding(words, size, dtype=torch.bfloat16).requires_grad_(False)
        self.body = nn.ModuleList([Patched(size), Patched(size)])
        self.say = nn.Linear(size, words, dtype=torch.bfloat16).requires_grad_(False)

    def forward(self, text):
        x = self.words(text)
        for layer in self.body:
            x = layer(x)
        return self.say(x)


torch.manual_seed(17)
student = Student()
optimizer = torch.optim.AdamW([p for p in student.parameters() if p.requires_grad], lr=1e-3)
for _lesson in range(3):
    text = torch.randint(30, (4, 10))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(student(text).flatten(0, 1).float(), text.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
with torch.no_grad():
    print(student(torch.randint(30, (1, 5))).argmax(-1))
