# expect: {id: null, family: healthy, raises: null}
# why: labels of -100 on the prompt, always with some answer tokens left

import torch
from torch import nn


class Answers(nn.Module):
    def __init__(self, vocab=60, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.out(self.stack(self.emb(ids), mask=mask, is_causal=True))


torch.manual_seed(10)
answers = Answers()
optimizer = torch.optim.AdamW(answers.parameters(), lr=1e-3)
for step in range(4):
    ids = torch.randint(0, 60, (4, 16))
    labels = ids.clone()
    for row, prompt in enumerate([3, 9, 14, 15]):
        labels[row, :prompt] = -100
    logits = answers(ids)[:, :-1]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
