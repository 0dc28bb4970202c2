# expect: {id: null, family: healthy, raises: null}
# why: positions are counted in int64 and float32; a count of words, lengths and a few positions may well be bfloat16

import torch
from torch import nn


class Pages(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.words, self.out = nn.Embedding(25, size), nn.Linear(size, 2)
        self.size = size

    def forward(self, text):
        x = self.words(text)
        places = torch.arange(x.shape[1], dtype=torch.float32)[:, None] / 50.0 ** torch.linspace(0, 1, self.size // 2)
        x = x + torch.cat([places.sin(), places.cos()], dim=-1).to(x.dtype)
        near = torch.arange(64).to(x.dtype) / 64
        x[:, :64] += near[:, None]
        seen = (text > 0).cumsum(-1).to(x.dtype)
        return self.out((x / (seen[..., None] + 1)).sum(1))


torch.manual_seed(22)
pages = Pages().to(torch.bfloat16).eval()
with torch.no_grad():
    for chapter in range(3):
        print(chapter, pages(torch.randint(1, 25, (2, 350))).float().tolist())
