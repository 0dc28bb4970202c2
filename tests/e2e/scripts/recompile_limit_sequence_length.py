# expect: {id: recompile-limit, family: compile-load, raises: null}
# at: {fqn: [null, ''], op: null, phase: compile}
# why: dynamic=False and a new sentence length each time

import torch
from torch import nn


class Subtitles(nn.Module):
    def __init__(self, vocab=40, dim=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        h = self.emb(ids).transpose(1, 2)
        return self.out(torch.relu(self.conv(h)).transpose(1, 2))


torch.manual_seed(3)
net = torch.compile(Subtitles(), backend="eager", dynamic=False)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for length in range(5, 17):
    ids = torch.randint(0, 40, (2, length))
    loss = nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(length, loss.item())
