# expect: {id: recompile-limit, family: compile-load, raises: null}
# at: {fqn: [null, '', soften], op: null, phase: compile}
# why: an integer attribute of a compiled module counts the steps, so each step compiles again until Dynamo gives up

import torch
from torch import nn


class Soften(nn.Module):
    def __init__(self):
        super().__init__()
        self.age = 0

    def forward(self, x):
        return torch.softmax(x / (1 + 10 / (1 + self.age)), -1)


class Picker(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Linear(5, 4)
        self.soften = Soften()

    def forward(self, x):
        return self.soften(self.rate(x))


torch.manual_seed(2)
picker = Picker()
quick = torch.compile(picker, backend="eager")
opt = torch.optim.SGD(picker.parameters(), lr=0.1)
for age in range(12):
    picker.soften.age = age
    x = torch.randn(20, 5)
    loss = -quick(x).gather(1, x[:, :4].argmax(-1, keepdim=True)).log().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(age, f"{loss.item():.3f}")
