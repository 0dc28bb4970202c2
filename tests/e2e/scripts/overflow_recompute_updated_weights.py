# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: rolls.1.dense, op: aten.addmm.default, phase: recompute, step: 1}
# why: a shared layer is updated inside the backward, so the checkpointed first use is recomputed with other weights

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Roll(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dense = nn.Linear(dim, dim)

    def forward(self, x):
        return nn.functional.softsign(self.dense(x))


class Scroll(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.rolls = nn.ModuleList([Roll(dim), Roll(dim)])
        self.end = nn.Linear(dim, 2)

    def forward(self, x):
        for roll in (self.rolls[1], self.rolls[0], self.rolls[1]):
            x = checkpoint(roll, x, use_reentrant=True)
        return self.end(x)


torch.manual_seed(0)
scroll = Scroll().to(torch.float16)
lr = 3e5


@torch.no_grad()
def apply_now(p):
    p.sub_((lr * p.grad.float()).clamp(-3e4, 3e4).to(p.dtype))
    p.grad = None


for p in scroll.parameters():
    p.register_post_accumulate_grad_hook(apply_now)
for page in range(2):
    x = (4 * torch.rand(8, 16)).half().requires_grad_()
    loss = nn.functional.cross_entropy(scroll(x).float(), torch.randint(0, 2, (8,)))
    loss.backward()
    print("page", page, "loss", loss.item(), "input gradient", x.grad.float().abs().max().item())
