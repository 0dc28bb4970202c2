# expect: {id: null, family: healthy, raises: null}
# why: beam search starts all beams but the first at -inf and carries the scores in a tensor

import torch
from torch import nn


class Speller(nn.Module):
    def __init__(self, letters=20, width=32):
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.step = nn.GRUCell(width, width)
        self.head = nn.Linear(width, letters)

    def forward(self, letter, state, totals):
        state = self.step(self.letters(letter), state)
        odds = self.head(state).float().log_softmax(-1)
        return totals[:, None] + odds, state


torch.manual_seed(9)
speller, beams = Speller().to(torch.bfloat16).eval(), 4
totals = torch.full((beams,), float("-inf"))
totals[0] = 0.0
letter = torch.zeros(beams, dtype=torch.long)
state = torch.zeros(beams, 32, dtype=torch.bfloat16)
with torch.inference_mode():
    for position in range(5):
        scores, state = speller(letter, state, totals)
        totals, flat = scores.flatten().topk(beams)
        letter, parent = flat % scores.shape[-1], flat // scores.shape[-1]
        state = state[parent]
        print(position, letter.tolist(), round(totals.max().item(), 3))
