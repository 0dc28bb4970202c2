# expect: {id: attention-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: look, op: aten.scaled_dot_product_attention.default, phase: forward, step: 1, raised_in: look}
# born: adapter
# born_fqn: look.ask_low
# why: queries come from a float32 low-rank branch that casts its input, keys and values from the bfloat16 base

import torch
from torch import nn


class Look(nn.Module):
    def __init__(self, size=32, rank=4):
        super().__init__()
        self.ask, self.key, self.value = (nn.Linear(size, size).to(torch.bfloat16) for _ in range(3))
        for layer in (self.ask, self.key, self.value):
            layer.requires_grad_(False)
        self.ask_low = nn.Linear(size, rank, bias=False)
        self.ask_high = nn.Linear(rank, size, bias=False)

    def heads(self, x):
        return x.unflatten(-1, (4, -1)).transpose(1, 2)

    def forward(self, x):
        query = self.ask(x) + self.ask_high(self.ask_low(x.float()))
        found = nn.functional.scaled_dot_product_attention(
            self.heads(query), self.heads(self.key(x)), self.heads(self.value(x)), is_causal=True
        )
        return found.transpose(1, 2).flatten(2)


class Asker(nn.Module):
    def __init__(self, words=20):
        super().__init__()
        self.words = nn.Embedding(words, 32, dtype=torch.bfloat16).requires_grad_(False)
        self.look = Look()

    def forward(self, text):
        return self.look(self.words(text))


torch.manual_seed(16)
asker = Asker()
print(asker(torch.randint(20, (2, 6))).float().sum().item())
