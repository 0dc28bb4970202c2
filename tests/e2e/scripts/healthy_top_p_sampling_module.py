# expect: {id: null, family: healthy, raises: null}
# why: top-k and top-p sampling inside the model push all other words to -inf, on purpose, in float16

import torch
from torch import nn


class Waiter(nn.Module):
    def __init__(self, dishes=40, size=24):
        super().__init__()
        self.cards = nn.Embedding(dishes, size)
        self.talk = nn.GRUCell(size, size)
        self.say = nn.Linear(size, dishes)

    def forward(self, dish, mood):
        mood = self.talk(self.cards(dish), mood)
        logits = self.say(mood).float() * 4
        kept = logits.topk(8).values[..., -1:]
        logits = torch.where(logits < kept, -torch.inf, logits)
        ranked, order = logits.sort(descending=True)
        beyond = ranked.softmax(-1).cumsum(-1) - ranked.softmax(-1) > 0.9
        ranked = ranked.masked_fill(beyond, float("-inf"))
        return torch.full_like(logits, -torch.inf).scatter(-1, order, ranked), mood


torch.manual_seed(4)
waiter = Waiter().half().eval()
dish, mood = torch.zeros(3, dtype=torch.long), torch.zeros(3, 24).half()
with torch.no_grad():
    for course in range(6):
        logits, mood = waiter(dish, mood)
        dish = torch.multinomial(logits.softmax(-1), 1).squeeze(-1)
        print(course, dish.tolist())
