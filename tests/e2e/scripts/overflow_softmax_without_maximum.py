# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: votes, op: aten.exp.default, phase: forward, step: 1}
# why: a softmax written by hand without subtracting the maximum; exp of 12 is beyond float16

import torch
from torch import nn


class Votes(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.key = nn.Linear(dim, dim, bias=False)

    def forward(self, query, memory):
        score = query @ self.key(memory).transpose(-1, -2)
        strength = score.exp()
        return strength / strength.sum(-1, keepdim=True) @ memory


class Speller(nn.Module):
    def __init__(self, dim=96, letters=30):
        super().__init__()
        self.table = nn.Embedding(letters, dim)
        self.votes = Votes(dim)
        self.out = nn.Linear(dim, letters)

    def forward(self, word):
        h = self.table(word)
        return self.out(self.votes(h, h))


torch.manual_seed(3)
speller = Speller().to(torch.float16)
word = torch.randint(0, 30, (4, 9))
optimizer = torch.optim.SGD(speller.parameters(), lr=0.01)
for attempt in range(2):
    loss = nn.functional.cross_entropy(speller(word).flatten(0, 1).float(), word.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(attempt, loss.item())
