# expect: {id: null, family: healthy, raises: null}
# why: gradient accumulation over float16 autocast with a scaler, unscaled before clipping

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, words=80, tags=6, dim=24):
        super().__init__()
        self.emb = nn.Embedding(words, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.tag = nn.Linear(2 * dim, tags)

    def forward(self, ids):
        return self.tag(self.rnn(self.emb(ids))[0])


torch.manual_seed(18)
tagger = Tagger()
optimizer = torch.optim.AdamW(tagger.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
parts = 4
for step in range(3):
    total = 0.0
    for _ in range(parts):
        ids = torch.randint(0, 80, (2, 9))
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(tagger(ids).flatten(0, 1).float(), ids.flatten() % 6)
        scaler.scale(loss / parts).backward()
        total += loss.item() / parts
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(tagger.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(step, f"loss {total:.3f} norm {norm.item():.3f}")
