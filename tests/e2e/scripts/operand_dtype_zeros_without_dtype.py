# expect: {id: operand-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: desk, op: aten.index_add_.default, phase: forward, step: 1, raised_in: desk}
# why: the result buffer is made by torch.zeros without a dtype, the experts answer in bfloat16

import torch
from torch import nn


class Desk(nn.Module):
    def __init__(self, dim=32, count=4, chosen=2):
        super().__init__()
        self.chosen = chosen
        self.choose = nn.Linear(dim, count, bias=False)
        self.people = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)) for _ in range(count)]
        )

    def forward(self, x):
        flat = x.flatten(0, 1)
        weight, who = self.choose(flat).softmax(-1).topk(self.chosen, dim=-1)
        answer = torch.zeros(flat.shape, device=x.device)
        for number, person in enumerate(self.people):
            row, slot = (who == number).nonzero(as_tuple=True)
            if len(row):
                answer.index_add_(0, row, person(flat[row]) * weight[row, slot, None])
        return answer.view_as(x)


class Office(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(60, 32)
        self.desk = Desk()
        self.out = nn.Linear(32, 60)

    def forward(self, ids):
        h = self.emb(ids)
        return self.out(h + self.desk(h))


torch.manual_seed(6)
office = Office().to(torch.bfloat16)
ids = torch.randint(0, 60, (2, 10))
print("answer", office(ids).argmax(-1)[0].tolist())
