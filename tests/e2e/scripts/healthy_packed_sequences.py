# expect: {id: null, family: healthy, raises: null}
# why: packed sequences of different lengths, masked means, a maximum over padding filled with -inf, gradients clipped

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Listener(nn.Module):
    def __init__(self, words=40, size=16):
        super().__init__()
        self.words = nn.Embedding(words, size, padding_idx=0)
        self.ear = nn.LSTM(size, size, batch_first=True, bidirectional=True)
        self.judge = nn.Linear(4 * size, 3)

    def forward(self, story, lengths):
        packed = pack_padded_sequence(self.words(story), lengths, batch_first=True, enforce_sorted=False)
        heard, _ = pad_packed_sequence(self.ear(packed)[0], batch_first=True, total_length=story.shape[1])
        there = (torch.arange(story.shape[1]) < lengths[:, None])[..., None]
        loudest = heard.masked_fill(~there, -torch.inf).amax(1)
        usual = (heard * there).sum(1) / lengths[:, None]
        return self.judge(torch.cat([loudest, usual], dim=-1))


torch.manual_seed(34)
listener = Listener()
optimizer = torch.optim.RMSprop(listener.parameters(), lr=1e-3)
for evening in range(6):
    lengths = torch.randint(2, 13, (8,))
    story = torch.randint(1, 40, (8, 12)) * (torch.arange(12) < lengths[:, None])
    loss = nn.functional.cross_entropy(listener(story, lengths), torch.randint(3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(listener.parameters(), 0.5)
    optimizer.step()
    print(evening, loss.item(), norm.item())
