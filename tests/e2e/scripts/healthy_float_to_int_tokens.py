# expect: {id: null, family: healthy, raises: null}
# why: a cast from float to int that is meant, the quantisation of pixels into token ids

import torch
from torch import nn


class PixelTokens(nn.Module):
    def __init__(self, levels=16, dim=24):
        super().__init__()
        self.levels = levels
        self.emb = nn.Embedding(levels, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, levels)

    def tokens(self, picture):
        return (picture.flatten(1) * self.levels).long().clamp(0, self.levels - 1)

    def forward(self, picture):
        ids = self.tokens(picture)
        states, _ = self.rnn(self.emb(ids[:, :-1]))
        return self.out(states), ids[:, 1:]


class Loop:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def training_step(self, batch):
        logits, target = self.model(batch)
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    def fit(self, batches):
        for number, batch in enumerate(batches):
            loss = self.training_step(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            print("batch", number, "loss", loss.item())


torch.manual_seed(12)
Loop(PixelTokens()).fit(torch.rand(8, 6, 6) for _ in range(4))
