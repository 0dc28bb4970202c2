# expect: {id: head-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: [letters, squash.1], op: aten.addmm.default, phase: forward, step: 1, raised_in: letters}
# born: compute-dtype
# born_fqn: squash.1
# why: the 4-bit layer computes in its default float32 and hands that on, the output layer is float16

import bitsandbytes as bnb
import torch
from torch import nn


class Lean(bnb.nn.Linear4bit):
    def forward(self, x):
        x = x.to(self.compute_dtype)
        return bnb.matmul_4bit(x, self.weight, bias=None, quant_state=self.weight.quant_state)


class Letters(nn.Module):
    def __init__(self, mel=64, hidden=128, letters=29):
        super().__init__()
        self.squash = nn.Sequential(nn.LayerNorm(mel), Lean(mel, hidden, bias=False, compute_dtype=torch.float32))
        self.letters = nn.Linear(hidden, letters)

    def forward(self, mel):
        return self.letters(torch.relu(self.squash(mel)))


torch.manual_seed(19)
speech = Letters().half()
dense = torch.randn(128, 64, dtype=torch.float16) / 8
speech.squash[1].weight = bnb.nn.Params4bit(dense, requires_grad=False, quant_type="nf4")
speech = speech.to("cpu")
opt = torch.optim.SGD(speech.letters.parameters(), lr=0.01)
mel = torch.randn(2, 40, 64, dtype=torch.float16)
log_probs = speech(mel).float().log_softmax(-1).transpose(0, 1)
loss = nn.functional.ctc_loss(log_probs, torch.randint(1, 29, (2, 8)), torch.tensor([40, 40]), torch.tensor([8, 8]))
loss.backward()
opt.step()
print("ctc", loss.item())
