# expect: {id: compile-graph-break, family: compile-load, raises: null}
# at: {fqn: [p, _orig_mod.p], phase: compile}
# why: a layer fills its weight by a C function; Dynamo stops inside ctypes, and the line that called it is the one to change

import ctypes

import torch
from torch import nn

libc = ctypes.CDLL(None)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("q", torch.randint(-8, 8, (16, 16), dtype=torch.int8))
        self.register_buffer("scale", torch.full((16, 1), 0.05))
        self.out = torch.empty(16, 16, dtype=torch.int8)

    def forward(self, x):
        libc.memcpy(ctypes.c_void_p(self.out.data_ptr()), ctypes.c_void_p(self.q.data_ptr()), ctypes.c_size_t(256))
        return x @ (self.out.to(x.dtype) * self.scale.to(x.dtype)).t()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.p = Packed()
        self.b = nn.Linear(16, 2)

    def forward(self, x):
        return self.b(torch.relu(self.p(self.a(x))))


torch.manual_seed(0)
f = torch.compile(Net(), backend="aot_eager")
for _ in range(2):
    f(torch.randn(4, 8)).sum().backward()
