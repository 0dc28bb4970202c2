# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: refine.close, op: aten.addmm.default, phase: forward, step: 1}
# why: one module is called four times; only a later pass leaves the range

import torch
from torch import nn


class Refine(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.widen = nn.Linear(dim, 2 * dim)
        self.close = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.close(torch.relu(self.widen(x)))


class Solver(nn.Module):
    def __init__(self, dim=16, rounds=6):
        super().__init__()
        self.refine, self.rounds = Refine(dim), rounds
        self.answer = nn.Linear(dim, 4)

    def forward(self, x):
        for _ in range(self.rounds):
            x = self.refine(x)
        return self.answer(x)


torch.manual_seed(23)
solver = Solver()
nn.init.uniform_(solver.refine.widen.weight, 0, 2)
nn.init.uniform_(solver.refine.close.weight, 0, 2)
solver = solver.half().eval()
with torch.no_grad():
    puzzle = torch.rand(5, 16).half()
    print("answers", solver(puzzle).softmax(-1).max(-1).values.tolist())
