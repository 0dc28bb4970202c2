# expect: {id: router-flip, family: silent, raises: null}
# at: {fqn: moe.gate, op: aten.mm.default, phase: forward, step: 1}
# shows: "sent elsewhere: [1-9]"
# why: a bfloat16 gate chooses other experts than float32; the gain of one norm stalls besides, and does not lead

import torch
from torch import nn


class MoE(nn.Module):
    def __init__(self, d, n=16, k=2):
        super().__init__()
        self.k = k
        self.gate = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, d)) for _ in range(n))

    def forward(self, x):
        b, t, d = x.shape
        flat = x.reshape(-1, d)
        probs = nn.functional.softmax(self.gate(flat), dim=-1)
        w, idx = probs.topk(self.k, dim=-1)
        w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for e, ex in enumerate(self.experts):
            tok, slot = (idx == e).nonzero(as_tuple=True)
            if tok.numel():
                out.index_add_(0, tok, ex(flat[tok]) * w[tok, slot, None])
        return out.view(b, t, d)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(256, 64)
        self.norm = nn.LayerNorm(64)
        self.moe = MoE(64)
        self.head = nn.Linear(64, 256)

    def forward(self, i):
        h = self.emb(i)
        return self.head(h + self.moe(self.norm(h)))


torch.manual_seed(0)
net = Net().bfloat16()
opt = torch.optim.SGD(net.parameters(), lr=1.0)
for _ in range(3):
    ids = torch.randint(0, 256, (16, 64))
    loss = nn.functional.cross_entropy(net(ids).float().flatten(0, 1), ids.flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(loss.item())
with torch.no_grad():
    rows = net.norm(net.emb(ids)).flatten(0, 1)
    chosen = net.moe.gate(rows).softmax(-1).topk(2).indices.sort().values
    exact = (rows.float() @ net.moe.gate.weight.float().T).topk(2).indices.sort().values
print("sent elsewhere:", (chosen != exact).any(-1).sum().item())
