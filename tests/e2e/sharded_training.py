"""A training of several ranks that fails on one of them, for tests: ``torchrun --nproc-per-node 2 sharded_training.py STRATEGY FAULT [--width …]``.

It runs on GPUs over NCCL where there are any, else on CPUs over gloo, and prints digests of everything that it has trained.
"""

import argparse
import hashlib
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Loud(torch.autograd.Function):
    """Multiplies the gradient by so much that float16 overflows."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * 1e12


class Block(nn.Module):
    """Two linear layers around an activation, with dropout; the call that is told how fails like that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, fault: str = "none") -> Tensor:
        hidden = self.norm(x).float() if fault == "dtype" else self.norm(x)
        hidden = self.up(Loud.apply(hidden) if fault == "backward" else hidden)
        hidden = hidden * (1e6 if fault in ("forward", "collective") else 1.0)
        return x + self.drop(self.down(torch.relu(hidden)))


class Net(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, width: int, depth: int, recompute: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64)
        self.recompute = recompute

    def forward(self, ids: Tensor, fault: str) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            given = (x, fault if number == len(self.blocks) // 2 else "none")
            x = checkpoint(block, *given, use_reentrant=False) if self.recompute else block(*given)
        return self.head(self.norm(x)).clone()


def sharded(net: Net) -> nn.Module:
    """Each block a unit of FSDP2, computing in float16."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(net, mp_policy=policy)


def digest(tensors: list[Tensor]) -> str:
    """Of the bits of what this rank holds of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(own.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


parser = argparse.ArgumentParser()
parser.add_argument("strategy", choices=["fsdp", "ddp"])
parser.add_argument("fault", choices=["none", "forward", "backward", "dtype", "collective"])
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--depth", type=int, default=4)
parser.add_argument("--rows", type=int, default=32)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--recompute", action="store_true")
parser.add_argument(
    "--scaler", action="store_true", help="a gradient scaler skips steps whose gradients are not finite"
)
parser.add_argument("--ahead", action="store_true", help="nothing waits for the device")
options = parser.parse_args()

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = torch.Generator().manual_seed(rank)
net = Net(options.width, options.depth, options.recompute).to(device)
if options.strategy == "fsdp":
    model = sharded(net)
else:
    model = DistributedDataParallel(net.half(), device_ids=[device] if on_gpu else None)
torch.manual_seed(rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)
scaler = torch.amp.GradScaler(device.type, init_scale=1.0, enabled=options.scaler)
losses = []
for step in range(1, options.steps + 1):
    ids = torch.randint(0, 64, (options.rows,), generator=data)
    fault = options.fault if (rank, step) == (1, 2) else "none"
    if step == 2 and options.fault == "collective":
        drop = net.blocks[options.depth // 2].drop
        drop.register_forward_hook(lambda *_: dist.all_reduce(torch.ones(1, device=device)))
    loss = nn.functional.cross_entropy(model(ids.to(device), fault).float(), ids.to(device))
    scaler.scale(loss).backward()
    if not options.ahead:
        losses.append(loss.item())
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
print(
    f"rank {rank}: weights {digest(list(model.parameters()))} states {digest(states)} losses {losses} "
    f"random {torch.rand(1).item()} {torch.rand(1, device=device).item()}\n",
    end="",
)
dist.destroy_process_group()
