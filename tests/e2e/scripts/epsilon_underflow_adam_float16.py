# expect: {id: optimizer-epsilon-underflow, family: nonfinite, raises: null}
# at: {fqn: emb, op: [aten.addcdiv_.default, aten._foreach_addcdiv_.ScalarList], phase: optimizer, step: 1}
# shows: 'loss nan'
# why: Adam's 1e-8 is zero in float16, so rows without a gradient become 0/0

import torch
from torch import nn


class WordModel(nn.Module):
    def __init__(self, vocab=120, dim=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.out(torch.tanh(self.rnn(self.emb(ids).mean(1))))


torch.manual_seed(4)
words = WordModel().half()
optimizer = torch.optim.AdamW(words.parameters(), lr=1e-3)
for step in range(3):
    ids, nxt = torch.randint(0, 120, (8, 5)), torch.randint(0, 120, (8,))
    loss = nn.functional.cross_entropy(words(ids).float(), nxt)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.3f}")
