# expect: {id: checkpoint-dtype-mismatch, family: compile-load, raises: null}
# at: {fqn: [null, ''], op: null, phase: static}
# shows: 'largest [0-9.e+]+ largest change [0-9.e-]*[1-9]'
# why: load_state_dict copies bfloat16 tensors into float16 parameters without a word; small weights are rounded away

import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 5))


torch.manual_seed(5)
old = build().to(torch.bfloat16)
with torch.no_grad():
    old[0].weight.mul_(1e-7)
torch.save({"weights": old.state_dict(), "epoch": 12}, "flat.pt")

new = build().to(torch.float16).eval()
saved = torch.load("flat.pt")
new.load_state_dict(saved["weights"])
change = max(
    (a.float() - b.float()).abs().max().item() for a, b in zip(old.parameters(), new.parameters(), strict=True)
)
with torch.no_grad():
    rooms = new(torch.randn(8, 16).half()).softmax(-1)
print("epoch", saved["epoch"], "largest", rooms.max().item(), "largest change", change)
