# expect: {id: rounded-rotary-buffer, family: silent, raises: null}
# at: {fqn: clock, op: aten._to_copy.default, phase: forward, step: 1}
# shows: "places told apart: 3"
# why: positions take the activations' bfloat16 before they are turned into sines, and 300 of them become fewer

import torch
from torch import nn


class Clock(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        rates = 100.0 ** (-torch.arange(0, self.size, 2) / self.size)
        places = torch.arange(x.shape[1]).to(x.dtype)
        angles = places[:, None] * rates.to(x.dtype)
        self.told_apart = places.unique().numel()
        return x + torch.cat([angles.sin(), angles.cos()], dim=-1)


class Poet(nn.Module):
    def __init__(self, words=30, size=16):
        super().__init__()
        self.words, self.clock = nn.Embedding(words, size), Clock(size)
        self.mix = nn.Linear(size, words)

    def forward(self, verse):
        return self.mix(self.clock(self.words(verse)))


torch.manual_seed(3)
poet = Poet().to(torch.bfloat16).eval()
with torch.no_grad():
    for _stanza in range(2):
        poet(torch.randint(30, (2, 380)))
        print("places told apart:", poet.clock.told_apart)
