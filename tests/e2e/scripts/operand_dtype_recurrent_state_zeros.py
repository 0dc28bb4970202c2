# expect: {id: operand-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: cell, op: aten.addmm.default, phase: forward, step: 1, raised_in: cell}
# why: the first recurrent state is a float32 torch.zeros in a float16 network

import torch
from torch import nn


class StrokeRecorder(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.lift = nn.Linear(3, dim)
        self.cell = nn.LSTMCell(dim, dim)
        self.pen = nn.Linear(dim, 5)

    def forward(self, strokes):
        batch, time, _ = strokes.shape
        h = torch.zeros(batch, self.cell.hidden_size)
        c = torch.zeros(batch, self.cell.hidden_size)
        drawn = []
        for t in range(time):
            h, c = self.cell(torch.relu(self.lift(strokes[:, t])), (h, c))
            drawn.append(self.pen(h))
        return torch.stack(drawn, 1)


torch.manual_seed(14)
recorder = StrokeRecorder().to(torch.float16)
strokes = torch.randn(2, 30, 3).to(torch.float16)
with torch.no_grad():
    lines = recorder(strokes)
print("pen up:", (lines[..., 2].float().sigmoid() > 0.5).sum().item())
