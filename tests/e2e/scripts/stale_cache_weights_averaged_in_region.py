# expect: {id: stale-autocast-cache, family: silent, raises: null}
# at: {fqn: [net, net.0, net.2], op: null, phase: forward, step: 6}
# shows: 'average (\S+) raw \1'
# why: averaged weights are copied in with .data inside the region in which the raw ones were already cast

import copy

import torch
from torch import nn


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))

    def forward(self, scan):
        return self.net(scan)


torch.manual_seed(5)
model = Segmenter()
average = copy.deepcopy(model)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(5):
    scan = torch.rand(2, 1, 12, 12)
    organ = (scan[:, 0] > 0.6).long()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(scan).float(), organ)
    opt.zero_grad()
    loss.backward()
    opt.step()
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.data.lerp_(fast.data, 0.1)

with torch.autocast("cpu", dtype=torch.bfloat16):
    raw = nn.functional.cross_entropy(model(scan).float(), organ).item()
    for p, slow in zip(model.parameters(), average.parameters(), strict=True):
        p.data.copy_(slow.data)
    with torch.no_grad():
        smooth = nn.functional.cross_entropy(model(scan).float(), organ).item()
print(f"average {smooth:.6f} raw {raw:.6f}")
