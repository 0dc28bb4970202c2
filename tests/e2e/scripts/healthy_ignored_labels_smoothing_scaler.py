# expect: {id: null, family: healthy, raises: null}
# why: the class of every second token is ignored and labels are smoothed, over float16 autocast with a scaler

import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self, words=60, size=24):
        super().__init__()
        self.words = nn.Embedding(words, size, padding_idx=0)
        self.norm = nn.LayerNorm(size)
        self.heads = nn.Linear(size, words)

    def forward(self, tokens):
        return self.heads(self.norm(self.words(tokens)))


torch.manual_seed(14)
reader = Reader()
optimizer = torch.optim.AdamW(reader.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
judge = nn.CrossEntropyLoss(ignore_index=-100, label_smoothing=0.1)
for page in range(6):
    tokens = torch.randint(1, 60, (4, 12))
    labels = tokens.roll(-1, 1)
    labels[:, ::2] = -100
    tokens[:, -3:] = 0
    with torch.autocast("cpu", dtype=torch.float16):
        loss = judge(reader(tokens).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(page, loss.item())
