# expect: {id: head-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: grade, op: aten.addmm.default, phase: forward, step: 1, raised_in: grade}
# born: load-dtype
# why: the encoder was loaded in bfloat16, the new classification layer is float32 by default

import tempfile

import torch
from torch import nn
from transformers import BertConfig, BertModel


class ClauseGrader(nn.Module):
    def __init__(self, encoder, grades=4):
        super().__init__()
        self.encoder = encoder
        self.drop = nn.Dropout(0.1)
        self.grade = nn.Linear(encoder.config.hidden_size, grades)

    def forward(self, ids, attention_mask):
        first = self.encoder(input_ids=ids, attention_mask=attention_mask).last_hidden_state[:, 0]
        return self.grade(self.drop(first))


torch.manual_seed(3)
config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
with tempfile.TemporaryDirectory() as folder:
    BertModel(config).save_pretrained(folder)
    grader = ClauseGrader(BertModel.from_pretrained(folder, dtype=torch.bfloat16))

optimizer = torch.optim.AdamW(grader.parameters(), lr=5e-5)
ids, mask = torch.randint(0, 100, (4, 24)), torch.ones(4, 24, dtype=torch.long)
for epoch in range(2):
    loss = nn.functional.cross_entropy(grader(ids, mask), torch.tensor([0, 3, 1, 2]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(epoch, loss.item())
