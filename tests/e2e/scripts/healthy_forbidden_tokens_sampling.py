# expect: {id: null, family: healthy, raises: null}
# why: forbidden tokens get -inf and a probability of exactly zero; sampling is fine

import torch
from torch import nn


class Letters(nn.Module):
    def __init__(self, size=30, dim=20):
        super().__init__()
        self.emb = nn.Embedding(size, dim)
        self.cell = nn.GRUCell(dim, dim)
        self.out = nn.Linear(dim, size)

    def forward(self, letter, state):
        state = self.cell(self.emb(letter), state)
        return self.out(state), state


@torch.no_grad()
def write(net, length, forbidden):
    letter, state = torch.zeros(3, dtype=torch.long), torch.zeros(3, 20)
    text = []
    for _ in range(length):
        logits, state = net(letter, state)
        logits[:, forbidden] = -torch.inf
        cut = logits.topk(5, dim=-1).values[:, -1:]
        logits = torch.where(logits < cut, -torch.inf, logits)
        log_p = logits.log_softmax(-1)
        letter = torch.multinomial(log_p.exp(), 1).squeeze(-1)
        text.append(letter)
    return torch.stack(text, 1)


torch.manual_seed(9)
for line in write(Letters(), 10, [0, 4, 8]).tolist():
    print("".join(chr(97 + number % 26) for number in line))
