# expect: {id: silent-rescue, family: silent, raises: null}
# at: {fqn: amp, op: [aten.clamp.default, aten.mul.Tensor], phase: forward, step: 1}
# shows: 'peak 65504'
# why: a clamp to the largest float16 number hides that the gain made infinities

import torch
from torch import nn


class Amp(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, x):
        edge = torch.finfo(x.dtype).max
        return torch.clamp(x * self.gain, min=-edge, max=edge)


class Speaker(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(2, 4, 3, padding=1)
        self.amp = Amp(900.0)
        self.box = nn.Linear(4, 2)

    def forward(self, sound):
        loud = self.amp(self.mix(sound))
        return self.box((loud / 65504).transpose(1, 2)), loud


torch.manual_seed(13)
speaker = Speaker().to(torch.float16).eval()
with torch.no_grad():
    out, loud = speaker((torch.randn(1, 2, 400) * 100).half())
print("level", out.float().std().item(), "peak", int(loud.float().abs().max()))
