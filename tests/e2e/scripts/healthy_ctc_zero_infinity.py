# expect: {id: null, family: healthy, raises: null}
# why: CTC cannot align a target longer than its input and gives inf, which zero_infinity drops as intended

import torch
from torch import nn


class Listener(nn.Module):
    def __init__(self, bands=10, sounds=7):
        super().__init__()
        self.conv = nn.Conv1d(bands, 24, 3, padding=1)
        self.read = nn.Linear(24, sounds)

    def forward(self, waves):
        return self.read(torch.relu(self.conv(waves)).transpose(1, 2)).log_softmax(-1)


torch.manual_seed(2)
listener = Listener()
judge = nn.CTCLoss(zero_infinity=True)
optimizer = torch.optim.SGD(listener.parameters(), lr=0.05, momentum=0.9)
for song in range(6):
    waves = torch.randn(4, 10, 12)
    words = torch.randint(1, 7, (4, 9))
    heard = torch.tensor([12, 12, 5, 12])  # the third is shorter than its words
    loss = judge(listener(waves).transpose(0, 1), words, heard, torch.tensor([5, 4, 9, 3]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(song, loss.item())
