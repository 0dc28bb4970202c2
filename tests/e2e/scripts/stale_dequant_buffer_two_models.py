# expect: {id: stale-dequant-buffer, family: mismatch, raises: RuntimeError}
# at: {fqn: first, op: aten.mm.default, phase: forward, step: 2, raised_in: first}
# why: the shared scratch keeps the first model's bfloat16 while the second model's weights dequantise to float16

import bitsandbytes.functional as q4
import torch
from torch import nn

scratch = {}


def unpack(packed, state):
    need = state.shape.numel()
    room = scratch.get(packed.device)
    if room is None or room.numel() < need:
        room = scratch[packed.device] = torch.empty(need, dtype=state.dtype)
    room = room[:need].view(state.shape)
    room.view(torch.int16).copy_(q4.dequantize_4bit(packed, state).view(torch.int16))
    return room


class Packed(nn.Module):
    def __init__(self, fan_in, fan_out, dtype):
        super().__init__()
        weight = torch.randn(fan_out, fan_in, dtype=dtype) / fan_in**0.5
        self.packed, self.state = q4.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)

    def forward(self, x):
        return x @ unpack(self.packed, self.state).t()


class Translator(nn.Module):
    def __init__(self, dtype, dim=64, vocab=100):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, dtype=dtype)
        self.first, self.second = Packed(dim, 128, dtype), Packed(128, dim, dtype)

    def forward(self, ids):
        h = self.emb(ids)
        return (h + self.second(torch.tanh(self.first(h)))) @ self.emb.weight.t()


torch.manual_seed(3)
sentence = torch.randint(0, 100, (1, 9))
for language, dtype in (("fr", torch.bfloat16), ("de", torch.float16)):
    translator = Translator(dtype)
    with torch.no_grad():
        print(language, translator(sentence).argmax(-1).tolist())
    del translator
