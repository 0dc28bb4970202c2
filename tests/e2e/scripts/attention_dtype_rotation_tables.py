# expect: {id: attention-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: att, op: aten.scaled_dot_product_attention.default, phase: forward, step: 1, raised_in: att}
# born: buffer
# born_fqn: att
# why: the float32 rotation tables lift queries and keys, values stay bfloat16

import torch
from torch import nn


def turn(x, c, s):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * c - b * s, a * s + b * c], dim=-1)


class Attend(nn.Module):
    def __init__(self, dim, heads, longest):
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.inp = nn.Linear(dim, 3 * dim, dtype=torch.bfloat16)
        self.out = nn.Linear(dim, dim, dtype=torch.bfloat16)
        speed = 10000 ** (-torch.arange(0, self.size, 2) / self.size)
        angle = torch.outer(torch.arange(longest), speed)
        self.register_buffer("c", angle.cos(), persistent=False)
        self.register_buffer("s", angle.sin(), persistent=False)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, self.size).transpose(1, 2) for z in self.inp(x).chunk(3, -1))
        q, k = turn(q, self.c[:t], self.s[:t]), turn(k, self.c[:t], self.s[:t])
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Melody(nn.Module):
    def __init__(self):
        super().__init__()
        self.notes = nn.Embedding(88, 32, dtype=torch.bfloat16)
        self.att = Attend(32, 4, 128)
        self.pick = nn.Linear(32, 88, dtype=torch.bfloat16)

    def forward(self, notes):
        return self.pick(self.att(self.notes(notes)))


torch.manual_seed(9)
melody = Melody()
tune = torch.randint(0, 88, (1, 16))
print("next note", melody(tune)[0, -1].argmax().item())
