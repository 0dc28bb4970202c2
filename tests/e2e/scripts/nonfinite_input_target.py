# expect: {id: nonfinite-input, family: nonfinite, raises: null}
# at: {fqn: null, phase: forward, step: 2}
# shows: 'visit 1 .*nan'
# why: only the target, which no module ever sees, holds NaN

import numpy as np
import torch
from torch import nn

table = np.random.default_rng(8).normal(size=(96, 7)).astype("float32")
table[40, 6] = np.nan

torch.manual_seed(8)
rows = torch.from_numpy(table)
model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
for visit, part in enumerate(rows.split(32)):
    dose = model(part[:, :6]).squeeze(-1)
    loss = nn.functional.huber_loss(dose, part[:, 6])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("visit", visit, "huber", loss.item())
