"""What watching costs under DDP and FSDP2: the same training step with and without dtypedoctor, in turns, in one job.

    torchrun --nproc-per-node 2 -m tests.benchmarks.distributed_cost              # 4096 rows in each process
    torchrun --nproc-per-node 2 -m tests.benchmarks.distributed_cost --rows 16384
    torchrun --nproc-per-node 2 -m tests.benchmarks.distributed_cost --budget 5%  # timed from the sixtieth step of one watch on

Sixteen blocks of width 2048, bfloat16. The first process prints medians, ratios, the milliseconds that the host takes for a step before it
waits for the device, and the seconds of ten million additions in a Python loop, so that figures of different hosts compare.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dtypedoctor

WIDTH, BLOCKS = 2048, 16
SETTLED = 9
"""Steps of a watch before any is timed: the checks for silent failures look closer at the steps 1 to 4 and 8."""
THINNED = 60
"""Steps of a watch with a budget before any is timed: 40 are measured whole, then some in outline."""

Times = list[tuple[float, float]]
"""Milliseconds of steps, and those of the host."""


class Block(nn.Module):
    """A residual block of two linear modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))  # type: ignore[no-any-return]


def main() -> None:
    """Measures both kinds and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="rows of the batch of each process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", help="overhead budget of the watch")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    if rank == 0:
        print(
            f"torch {torch.__version__}, {options.rows} rows, ten million additions: {_yardstick():.2f} s", flush=True
        )
    for kind in ("ddp", "fsdp2"):
        plain, watched = _measured(kind, rank, options)
        if rank == 0:
            _print(f"{kind}, {options.rows} rows", plain, watched)
    dist.destroy_process_group()


def _measured(kind: str, rank: int, options: argparse.Namespace) -> tuple[Times, Times]:
    model = _build(kind, rank)
    step = _step_of(model, kind, rank, options.rows)
    plain: Times = []
    watched: Times = []
    for _ in range(5):
        step()
    chosen = {} if options.budget is None else {"overhead_budget": options.budget}
    for _ in range(1 if chosen else options.rounds):
        step()
        plain += [step() for _ in range(6)]
        with tempfile.TemporaryDirectory() as directory, dtypedoctor.watch(model, out=f"{directory}/{rank}", **chosen):
            for _ in range(THINNED if chosen else SETTLED):
                step()
            watched += [step() for _ in range(64 if chosen else 6)]
    plain += [step() for _ in range(6)]
    return plain, watched


def _build(kind: str, rank: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(f"cuda:{rank}")
    if kind == "ddp":
        return DistributedDataParallel(model.to(torch.bfloat16), device_ids=[rank])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*model, model):
        fully_shard(unit, mp_policy=policy)
    return model


def _step_of(model: nn.Module, kind: str, rank: int, rows: int) -> Callable[[], tuple[float, float]]:
    """A training step, which returns its milliseconds and those of the host."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batch = torch.randn(rows, WIDTH, device=f"cuda:{rank}", dtype=torch.bfloat16 if kind == "ddp" else torch.float32)

    def step() -> tuple[float, float]:
        began = time.perf_counter()
        model(batch).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began), 1e3 * host

    return step


def _print(what: str, plain: Times, watched: Times) -> None:
    (before, host_before), (after, host_after) = (
        tuple(map(statistics.median, zip(*times, strict=True))) for times in (plain, watched)
    )
    mean = statistics.mean(total for total, _ in watched) / statistics.mean(total for total, _ in plain)
    fastest = min(watched)[0] / min(plain)[0]
    print(
        f"{what}: {before:.1f} -> {after:.1f} ms, ratio {after / before:.3f}, of the means {mean:.3f}, of the fastest steps {fastest:.3f}, "
        f"host {host_before:.1f} -> {host_after:.1f} ms",
        flush=True,
    )


def _yardstick() -> float:
    began, total = time.perf_counter(), 0
    for number in range(10_000_000):
        total += number
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
