# expect: {id: autocast-bypass, family: mismatch, raises: RuntimeError}
# at: {fqn: '', op: aten.addmm.out, phase: forward, step: 1, raised_in: ''}
# born: inplace
# born_fqn: ""
# why: the chunked loss accumulates its weight gradient with out= into a float32 buffer, which autocast never casts

import torch
from torch import nn

fn = nn.functional


class ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, pieces):
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros((), dtype=torch.float32)
        for part in torch.arange(len(hidden)).chunk(pieces):
            h = hidden[part]
            logits = h @ weight.t()
            probs = logits.softmax(-1)
            total += fn.nll_loss(probs.float().log(), target[part], reduction="sum")
            probs[torch.arange(len(part)), target[part]] -= 1
            d_hidden[part] = (probs @ weight).to(hidden.dtype)
            torch.addmm(d_weight, probs.t(), h, out=d_weight)
        ctx.save_for_backward(d_hidden / len(hidden), d_weight / len(hidden))
        return total / len(hidden)

    @staticmethod
    def backward(ctx, g):
        d_hidden, d_weight = ctx.saved_tensors
        return g * d_hidden, g * d_weight, None, None


class LongReader(nn.Module):
    def __init__(self, vocab=96, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.vocab = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids[:, :-1]))
        return ChunkedLoss.apply(h.flatten(0, 1), self.vocab.weight, ids[:, 1:].flatten(), 4)


torch.manual_seed(4)
reader = LongReader()
opt = torch.optim.SGD(reader.parameters(), lr=0.1)
for step in range(2):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = reader(torch.randint(0, 96, (2, 33)))
    loss.backward()
    opt.step()
    print(step, loss.item())
