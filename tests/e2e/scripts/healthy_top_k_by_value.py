# expect: {id: null, family: healthy, raises: null}
# why: half-precision logits of many guests are cut to the best few by value; nothing is looked up with the indices

import torch
from torch import nn


class Kitchen(nn.Module):
    def __init__(self, dishes=48, size=24):
        super().__init__()
        self.taste = nn.Embedding(dishes, size)
        self.cook, self.offer = nn.Linear(size, size), nn.Linear(size, dishes)

    def forward(self, eaten):
        wish = self.offer(torch.tanh(self.cook(self.taste(eaten))))
        least = wish.topk(6).values[..., -1:]
        return wish.masked_fill(wish < least, -torch.inf)


torch.manual_seed(31)
kitchen = Kitchen().to(torch.bfloat16).eval()
eaten = torch.randint(48, (512,))
with torch.inference_mode():
    for course in range(4):
        eaten = torch.multinomial(kitchen(eaten).float().softmax(-1), 1).squeeze(-1)
        print(course, eaten.float().mean().item())
