# expect: {id: fully-masked-row, family: nonfinite, raises: RuntimeError}
# at: {fqn: null, op: aten._softmax.default, phase: forward, step: 3}
# why: after a closing bracket the grammar allows no token at all, so softmax has a row of -inf and multinomial raises

import torch
from torch import nn

ALLOWED = {0: [1, 2], 1: [3], 2: [3], 3: []}


class Next(nn.Module):
    def __init__(self, vocab=4, dim=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.cell = nn.GRUCell(dim, dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, token, state):
        state = self.cell(self.emb(token), state)
        return self.out(state), state


@torch.no_grad()
def decode(net, length):
    token, state, text = torch.tensor([0]), torch.zeros(1, 16), [0]
    for _ in range(length):
        logits, state = net(token, state)
        banned = torch.ones(4, dtype=torch.bool)
        banned[ALLOWED[text[-1]]] = False
        chance = logits.masked_fill(banned, -torch.inf).softmax(-1)
        token = torch.multinomial(chance, 1).squeeze(-1)
        text.append(token.item())
    return text


torch.manual_seed(0)
print(decode(Next(), 5))
