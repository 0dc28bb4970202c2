# expect: {id: gradient-underflow, family: silent, raises: null}
# at: {op: null, phase: backward, step: 1}
# shows: 'zero gradients 9\d%'
# why: a loss divided by a large constant gives gradients below float16's smallest number, and there is no scaler

import torch
from torch import nn


class Tutor(nn.Module):
    def __init__(self):
        super().__init__()
        self.listen = nn.Linear(12, 32)
        self.speak = nn.Linear(32, 4)

    def forward(self, x):
        return self.speak(torch.relu(self.listen(x)))


torch.manual_seed(3)
tutor = Tutor().to(torch.float16)
optimizer = torch.optim.SGD(tutor.parameters(), lr=0.1)
for step in range(4):
    x, reward = torch.randn(16, 12).half(), 1e-3 * torch.rand(16)
    chosen = tutor(x).float().log_softmax(-1).amax(-1)
    loss = -(chosen * reward).mean() / 1000
    optimizer.zero_grad()
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in tutor.parameters()])
    optimizer.step()
    print(f"step {step} loss {loss.item():.2e} zero gradients {(flat == 0).float().mean() * 100:.0f}%")
