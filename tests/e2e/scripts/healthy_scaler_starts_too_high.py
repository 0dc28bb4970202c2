# expect: {id: null, family: healthy, raises: null}
# shows: 'taken 0\n(?s:.*)taken [5-9]\n'
# why: the scaler starts far too high, skips its first steps, halves, and then every step is taken

import torch
from torch import nn


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(20, 16, 3)
        self.out = nn.Linear(16, 10)

    def forward(self, mel):
        return self.out(torch.relu(self.conv(mel)).mean(-1))


torch.manual_seed(2)
speech = Speech()
optimizer = torch.optim.SGD(speech.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
taken = 0
for step in range(12):
    mel, word = torch.randn(16, 20, 30), torch.randint(0, 10, (16,))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = speech(mel)
    loss = nn.functional.cross_entropy(logits.float(), word)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    taken += int(scaler.get_scale() >= before)
    print(f"{step} loss {loss.item():.3f} scale {scaler.get_scale():.0f} taken {taken}")
