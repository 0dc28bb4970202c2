# expect: {id: merge-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: '', op: aten.index_put_.default, phase: forward, step: 1, raised_in: ''}
# born: load-dtype
# born_fqn: eye
# why: picture features from a float32 tower are written into bfloat16 word embeddings by mask

import torch
from torch import nn

PICTURE = 3


class Eye(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 8, stride=8)
        self.project = nn.Linear(dim, dim)

    def forward(self, images):
        return self.project(self.patches(images).flatten(2).transpose(1, 2))


class Captioner(nn.Module):
    def __init__(self, eye, dim=32, vocab=100):
        super().__init__()
        self.eye = eye
        self.words = nn.Embedding(vocab, dim, dtype=torch.bfloat16)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, batch_first=True, dtype=torch.bfloat16)
        self.text = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.vocab = nn.Linear(dim, vocab, dtype=torch.bfloat16)

    def forward(self, ids, images):
        h = self.words(ids)
        seen = self.eye(images).flatten(0, 1)
        h[ids == PICTURE] = seen
        return self.vocab(self.text(h))


torch.manual_seed(2)
captioner = Captioner(Eye(32))
ids = torch.randint(4, 100, (2, 12))
ids[:, 1:5] = PICTURE
with torch.no_grad():
    print(captioner(ids, torch.randn(2, 3, 16, 16)).shape)
