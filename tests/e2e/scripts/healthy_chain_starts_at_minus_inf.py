# expect: {id: null, family: healthy, raises: null}
# why: the forward algorithm of a chain starts at -inf for all states but one and forbids transitions with -inf

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, words=50, tags=5):
        super().__init__()
        self.words, self.emit = nn.Embedding(words, 16), nn.Linear(16, tags)
        allowed = torch.ones(tags, tags).triu(-1).bool()
        self.register_buffer("allowed", torch.where(allowed, 0.0, -torch.inf))

    def forward(self, sentence):
        emitted = self.emit(self.words(sentence)).float().log_softmax(-1)
        alpha = torch.full_like(emitted[:, 0], -torch.inf)
        alpha[:, 0] = emitted[:, 0, 0]
        for t in range(1, sentence.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + self.allowed, dim=1) + emitted[:, t]
        return alpha.logsumexp(-1)


torch.manual_seed(5)
tagger = Tagger().eval()
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    for page in range(4):
        print(page, tagger(torch.randint(50, (8, 7))).mean().item())
