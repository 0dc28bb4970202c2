# expect: {id: stale-dequant-buffer, family: silent, raises: null}
# at: {fqn: up, phase: forward, step: 2}
# shows: 'second: mean weight 1\.0\d|second: mean weight [1-9]\.'
# why: the scratch is an attribute of a module that both models hold, and autocast casts what is read from it in silence

import bitsandbytes.functional as q4
import torch
from torch import nn


class Workspace(nn.Module):
    def __init__(self):
        super().__init__()
        self.room = None

    def forward(self, packed, state):
        need = state.shape.numel()
        if self.room is None or self.room.numel() < need:
            self.room = torch.zeros(need, dtype=state.dtype)
        dense = self.room[:need].view(state.shape)
        dense.view(torch.int16).copy_(q4.dequantize_4bit(packed, state).view(torch.int16))
        return dense


class Packed(nn.Module):
    def __init__(self, n_in, n_out, dtype, workspace):
        super().__init__()
        self.packed, self.state = q4.quantize_4bit(0.05 * torch.randn(n_out, n_in, dtype=dtype), quant_type="nf4")
        self.workspace, self.mean = workspace, 0.0

    def forward(self, x):
        weight = self.workspace(self.packed, self.state)
        self.mean = weight.float().abs().mean().item()
        return nn.functional.linear(x, weight)


class RecipeRanker(nn.Module):
    def __init__(self, dtype, workspace):
        super().__init__()
        self.dishes = nn.Embedding(80, 64, dtype=dtype)
        self.up, self.down = Packed(64, 128, dtype, workspace), Packed(128, 64, dtype, workspace)

    def forward(self, ids):
        h = self.dishes(ids)
        return h + self.down(torch.relu(self.up(h)))


torch.manual_seed(6)
workspace, ids = Workspace(), torch.randint(0, 80, (1, 16))
for name, dtype in (("first", torch.float16), ("second", torch.bfloat16)):
    net = RecipeRanker(dtype, workspace)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        pooled = net(ids).mean(1)
    print(f"{name}: mean weight {net.up.mean:.4f} pooled {pooled.float().norm():.3f}")
