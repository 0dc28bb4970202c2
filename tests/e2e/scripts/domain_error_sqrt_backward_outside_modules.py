# expect: {id: domain-error, family: nonfinite, raises: null}
# at: {fqn: null, op: aten.div.Tensor, phase: backward, step: 2}
# why: three calls of one network, then a distance outside of it whose root is taken at zero; only the backward is infinite

import torch
from torch import nn

torch.manual_seed(0)


class SongMatcher:
    """A training loop of its own kind: the network is no attribute of another module."""

    def __init__(self):
        self.ear = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.optimizer = torch.optim.AdamW(self.ear.parameters(), lr=1e-3)

    def distance(self, one, other):
        return ((one - other) ** 2).sum(1).sqrt()

    def training_step(self, batch):
        anchor, same, different = (self.ear(songs) for songs in batch)
        return torch.relu(self.distance(anchor, same) - self.distance(anchor, different) + 5.0).mean()

    def fit(self, batches):
        for batch in batches:
            self.optimizer.zero_grad()
            loss = self.training_step(batch)
            loss.backward()
            self.optimizer.step()
            print(loss.item())


def batches():
    for number in range(4):
        anchor, same, different = torch.randn(3, 6, 5)
        if number == 1:
            same[4] = anchor[4]
        yield anchor, same, different


SongMatcher().fit(batches())
