# expect: {id: model-input-dtype, family: mismatch, raises: ValueError}
# at: {fqn: rnn, op: null, phase: forward, step: 1, raised_in: rnn}
# born: model-input
# why: float32 filterbank frames go straight into a bfloat16 GRU, whose own check refuses before any op runs

import torch
from torch import nn


class KeywordSpotter(nn.Module):
    def __init__(self, mels=40, width=64, words=12):
        super().__init__()
        self.rnn = nn.GRU(mels, width, num_layers=2, batch_first=True)
        self.out = nn.Linear(width, words)

    def forward(self, frames):
        states, _ = self.rnn(frames)
        return self.out(states[:, -1])


torch.manual_seed(11)
net = KeywordSpotter().to(torch.bfloat16)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for it in range(3):
    frames = torch.randn(8, 50, 40)
    labels = torch.randint(0, 12, (8,))
    loss = nn.functional.cross_entropy(net(frames).float(), labels)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(it, loss.item())
