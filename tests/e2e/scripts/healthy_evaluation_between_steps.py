# expect: {id: null, family: healthy, raises: null}
# why: evaluation under no_grad and autocast between training steps, each in a region of its own

import torch
from torch import nn


def split(n):
    x = torch.randn(n, 12)
    return x, (x[:, :6].sum(-1) > x[:, 6:].sum(-1)).long()


@torch.no_grad()
def accuracy(model, x, y):
    model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        right = (model(x).argmax(-1) == y).float().mean().item()
    model.train()
    return right


torch.manual_seed(16)
model = nn.Sequential(nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
x_val, y_val = split(200)
for step in range(12):
    x, y = split(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 3 == 2:
        print(step, round(loss.item(), 3), round(accuracy(model, x_val, y_val), 3))
