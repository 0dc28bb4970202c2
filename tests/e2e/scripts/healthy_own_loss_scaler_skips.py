# expect: {id: null, family: healthy, raises: null}
# shows: "skip"
# why: a loss scaler of one's own starts too high and throws gradients away; no optimizer ever gets them

import torch
from torch import nn

torch.manual_seed(0)


def network():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


master = network()
half = network().half()
half.load_state_dict(master.state_dict())
optimizer = torch.optim.AdamW(master.parameters(), lr=1e-3)
scale = 2.0**22

for round_ in range(16):
    x = torch.randn(16, 8)
    loss = (half(x.half()).float() - x.sum(1, keepdim=True)).pow(2).mean()
    (loss * scale).backward()
    if any(not parameter.grad.isfinite().all() for parameter in half.parameters()):
        scale /= 4
        half.zero_grad()
        print(round_, "skip", scale)
        continue
    for exact, rounded in zip(master.parameters(), half.parameters(), strict=True):
        exact.grad = rounded.grad.float() / scale
    optimizer.step()
    half.zero_grad()
    with torch.no_grad():
        for exact, rounded in zip(master.parameters(), half.parameters(), strict=True):
            rounded.copy_(exact)
    print(round_, loss.item(), scale)
