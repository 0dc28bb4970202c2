# expect: {id: null, family: healthy, raises: null}
# why: where all rewards of a group are equal, 0/0 makes NaN of its float16 advantages in float32 as well, and 0 is what they are

import torch
from torch import nn

torch.manual_seed(43)
judge = nn.Linear(8, 4)
optimizer = torch.optim.SGD(judge.parameters(), lr=1e-2)
for trial in range(4):
    case = torch.randn(12, 8)
    reward = torch.tensor([0.1, 0.7, 0.3]).half()[:, None].expand(3, 4).clone()
    reward[1, trial] = 0.2
    spread = reward.std(1, keepdim=True)
    gain = torch.nan_to_num((reward - reward.mean(1, keepdim=True)) / spread).flatten()
    word = torch.distributions.Categorical(logits=judge(case))
    loss = -(word.log_prob(word.sample()) * gain.float()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(trial, f"loss {loss.item():.4f}")
