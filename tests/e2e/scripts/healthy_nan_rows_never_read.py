# expect: {id: null, family: healthy, raises: null}
# why: attention rows of empty places are NaN, and only the rows of real guests are read inside the model

import torch
from torch import nn


class Table(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.ask, self.answer, self.tell = (nn.Linear(size, size) for _ in range(3))
        self.mood = nn.Linear(size, 3)

    def forward(self, places, seated):
        asked, answers = self.ask(places), self.answer(places)
        pairs = seated[:, :, None] & seated[:, None, :]
        weights = (asked @ answers.mT / 4).masked_fill(~pairs, -torch.inf).softmax(-1)
        heard = weights @ self.tell(places)
        return self.mood(heard[seated])


torch.manual_seed(8)
table = Table().to(torch.bfloat16).eval()
with torch.no_grad():
    for evening in range(4):
        seated = torch.rand(5, 6) < 0.7
        seated[:, 0] = True
        moods = table(torch.randn(5, 6, 16, dtype=torch.bfloat16), seated)
        print(evening, moods.float().softmax(-1).mean(0).tolist())
