# expect: {id: null, family: healthy, raises: null}
# why: the scaler grows every other step, so that steps are skipped now and then, the last one too

import torch
from torch import nn

torch.manual_seed(12)
ear = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 1))
optimizer = torch.optim.SGD(ear.parameters(), lr=1e-3)
gain = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
for note in range(12):
    x = torch.randn(24, 12)
    with torch.autocast("cpu", dtype=torch.float16):
        heard = ear(x)
        loss = (heard.squeeze(-1) - x.sum(-1)).square().mean()
    optimizer.zero_grad()
    gain.scale(loss).backward()
    gain.step(optimizer)
    gain.update()
    print(note, loss.item(), gain.get_scale())
