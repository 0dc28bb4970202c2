# expect: {id: null, family: healthy, raises: null}
# why: the logarithm of a 0/1 mask gives -inf on purpose and is added to attention scores

import torch
from torch import nn


class Blend(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, present):
        bias = present.to(x.dtype).log().unsqueeze(1)
        near = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        return x + (near + bias).softmax(-1) @ x


class Crowd(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.into = nn.Linear(4, dim)
        self.blend = Blend(dim)
        self.speed = nn.Linear(dim, 2)

    def forward(self, people, present):
        return self.speed(self.blend(torch.relu(self.into(people)), present))


torch.manual_seed(29)
crowd = Crowd()
optimizer = torch.optim.NAdam(crowd.parameters(), lr=1e-2)
for frame in range(5):
    people = torch.randn(6, 10, 4)
    present = torch.arange(10)[None] < torch.randint(1, 11, (6, 1))
    error = (crowd(people, present) - people[..., 2:]).abs().sum(-1)
    loss = (error * present).sum() / present.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(frame, loss.item())
