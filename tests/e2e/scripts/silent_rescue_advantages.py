# expect: {id: silent-rescue, family: silent, raises: null}
# at: {fqn: null, op: aten.nan_to_num.default, step: 1}
# shows: 'untaught [1-9] of 8'
# why: an answer that fails its check is worth -inf, which makes NaN of its group's advantages; nan_to_num makes them 0

import torch
from torch import nn


class Writer(nn.Module):
    def __init__(self, words=40):
        super().__init__()
        self.embed = nn.Embedding(words, 32)
        self.next = nn.Linear(32, words)

    def forward(self, tokens):
        return self.next(self.embed(tokens))


def worth(replies):
    polite = (replies % 7 == 3).float().sum(-1)
    return polite.masked_fill((replies == 13).any(-1), float("-inf"))


torch.manual_seed(12)
writer = Writer()
optimizer = torch.optim.AdamW(writer.parameters(), lr=3e-3)
for lesson in range(4):
    prompts = torch.randint(0, 40, (8, 1, 6)).expand(8, 4, 6)
    logits = writer(prompts)
    drawn = torch.distributions.Categorical(logits=logits)
    replies = drawn.sample()
    rewards = worth(replies)
    gain = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    gain = torch.nan_to_num(gain)
    loss = -(drawn.log_prob(replies).sum(-1) * gain).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(lesson, f"loss {loss.item():.4f} untaught {int((gain == 0).all(1).sum())} of 8")
