# expect: {id: domain-error, family: nonfinite, raises: null}
# at: {fqn: null, op: aten.nll_loss_forward.default, phase: forward, step: 2}
# why: every label of the second batch is -100, so the mean over no elements is 0/0

import torch
from torch import nn


class Dialogue(nn.Module):
    def __init__(self, vocab=50, dim=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def build(prompt_length, length=12):
    ids = torch.randint(0, 50, (2, length))
    labels = ids.clone()
    labels[:, :prompt_length] = -100
    return ids, labels


torch.manual_seed(7)
dialogue = Dialogue()
optimizer = torch.optim.AdamW(dialogue.parameters(), lr=1e-3)
for step, prompt_length in enumerate([4, 12, 6]):
    ids, labels = build(prompt_length)
    logits = dialogue(ids)
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
