# expect: {id: custom-function-autocast, family: mismatch, raises: RuntimeError}
# at: {fqn: hops.1, op: aten.mm.default, phase: backward, step: 1, raised_in: hops.1}
# born: custom-fwd
# born_fqn: hops.1
# why: a hand-written backward without custom_fwd/custom_bwd sees bfloat16 gradients and the float32 tensors it saved

import torch
from torch import nn


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, nodes, weight, adjacency):
        mixed = adjacency @ nodes
        ctx.save_for_backward(mixed, weight, adjacency)
        return mixed @ weight

    @staticmethod
    def backward(ctx, grad):
        mixed, weight, adjacency = ctx.saved_tensors
        return adjacency.t().to(grad.dtype) @ (grad @ weight.t()), mixed.t() @ grad, None


class Hop(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out) / n_in**0.5)

    def forward(self, nodes, adjacency):
        return torch.relu(Gather.apply(nodes, self.weight, adjacency))


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.hops = nn.ModuleList([Hop(16, 16), Hop(16, 16)])
        self.label = nn.Linear(16, 4)

    def forward(self, nodes, adjacency):
        for hop in self.hops:
            nodes = hop(nodes, adjacency)
        return self.label(nodes)


torch.manual_seed(2)
adjacency = (torch.rand(20, 20) < 0.2).float()
adjacency = adjacency / adjacency.sum(-1, keepdim=True).clamp_min(1)
graph = Graph()
optimizer = torch.optim.Adam(graph.parameters(), lr=0.01)
with torch.autocast("cpu", dtype=torch.bfloat16):
    scores = graph(torch.randn(20, 16), adjacency)
    loss = nn.functional.cross_entropy(scores, torch.randint(0, 4, (20,)))
loss.backward()
optimizer.step()
print("loss", loss.item())
