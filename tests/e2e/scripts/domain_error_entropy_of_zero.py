# expect: {id: domain-error, family: nonfinite, raises: null}
# at: {fqn: null, op: [aten.mul.Tensor, aten.log.default], phase: forward, step: 1}
# why: entropy as p * log p with an exact zero in p

import torch
from torch import nn


class Topics(nn.Module):
    def __init__(self, words=40, topics=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(words, 32), nn.ReLU(), nn.Linear(32, topics))

    def forward(self, counts):
        strength = torch.relu(self.net(counts))
        return strength / strength.sum(-1, keepdim=True).clamp_min(1e-6)


torch.manual_seed(14)
topics = Topics()
opt = torch.optim.SGD(topics.parameters(), lr=0.05)
for step in range(2):
    counts = torch.rand(16, 40)
    share = topics(counts)
    entropy = -(share * share.log()).sum(-1).mean()
    loss = -0.1 * entropy + share.square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, "entropy", entropy.item())
