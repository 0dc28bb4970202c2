# expect: {id: rounded-rotary-buffer, family: silent, raises: null}
# at: {fqn: spin, op: null, phase: static}
# shows: "exam in bfloat16"
# why: training keeps the frequencies in float32; the evaluation afterwards casts the whole model, its buffers too

import torch
from torch import nn


class Spin(nn.Module):
    def __init__(self, half):
        super().__init__()
        self.register_buffer("rates", 10000.0 ** (-torch.arange(half) / half), persistent=False)

    def forward(self, x):
        turn = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * self.rates.float()
        left, right = x.chunk(2, dim=-1)
        sine, cosine = turn.sin().to(x.dtype), turn.cos().to(x.dtype)
        return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


class Pupil(nn.Module):
    def __init__(self, words=40, size=24):
        super().__init__()
        self.words, self.spin = nn.Embedding(words, size), Spin(size // 2)
        self.answer = nn.Linear(size, words)

    def forward(self, text):
        return self.answer(torch.tanh(self.spin(self.words(text))))


torch.manual_seed(1)
pupil = Pupil()
optimizer = torch.optim.Adam(pupil.parameters(), lr=1e-3)
for _lesson in range(4):
    text = torch.randint(40, (4, 20))
    loss = nn.functional.cross_entropy(pupil(text).flatten(0, 1), text.roll(-1, 1).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
pupil = pupil.to(torch.bfloat16).eval()
with torch.no_grad():
    print("exam in bfloat16", pupil(torch.randint(40, (2, 20))).float().std().item())
