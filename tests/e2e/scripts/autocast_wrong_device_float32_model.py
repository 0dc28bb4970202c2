# expect: {id: autocast-wrong-device, family: silent, raises: null}
# at: {fqn: null, op: null, phase: [static, forward]}
# shows: 'logits in torch\.float32'
# why: the region is for "cuda" and everything lives on the CPU, so nothing is computed in bfloat16

import torch
from torch import nn

torch.manual_seed(0)
centres = torch.tensor([[38.0, 18.0, 190.0], [48.0, 18.5, 196.0], [47.0, 15.0, 217.0]])
species = torch.randint(0, 3, (240,))
birds = (centres[species] + torch.randn(240, 3) - centres.mean(0)) / 10

model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
for epoch in range(5):
    for part in torch.randperm(240).split(48):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(birds[part])
            loss = nn.functional.cross_entropy(logits, species[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3f} logits in {logits.dtype}")
accuracy = (model(birds).argmax(-1) == species).float().mean()
print(f"accuracy {accuracy:.2f}")
