# expect: {id: null, family: healthy, raises: null}
# why: where all answers of a group are worth the same, 0/0 makes NaN of its advantages, and 0 is what they are

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
    polite = (replies == 3).float().sum(-1)
    return polite.masked_fill((replies == 13).any(-1), -4.0)


torch.manual_seed(15)
writer = Writer()
optimizer = torch.optim.AdamW(writer.parameters(), lr=3e-3)
for lesson in range(4):
    prompts = torch.randint(0, 40, (8, 1, 6)).expand(8, 4, 6)
    logits = writer(prompts)
    drawn = torch.distributions.Categorical(logits=logits)
    replies = drawn.sample()
    rewards = worth(replies)
    gain = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True))
    gain = torch.nan_to_num(gain)
    loss = -(drawn.log_prob(replies).sum(-1) * gain).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(lesson, f"loss {loss.item():.4f} untaught {int((gain == 0).all(1).sum())} of 8")
