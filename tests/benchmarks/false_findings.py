"""What the watch says of several GPUs beside what is so: healthy trainings, and trainings with one planted inf.

    torchrun --nproc-per-node 2 tests/benchmarks/false_findings.py [--healthy 50] [--planted 20] [--only NAME] [--backend nccl]

16 blocks (LayerNorm, Linear 2048 → 8192, GELU, Linear back, residual) are trained in bfloat16, replicated by
DistributedDataParallel or sharded by ``fully_shard``, with and without activation checkpointing, the shards' parameters freed
after the forward pass or kept. Healthy trainings are watched ``--healthy`` times in each configuration; a report with a finding is
false where every loss and every parameter is finite. Then one module of one rank puts an inf into what it returns: the job's report
has to name that rank and that module. Prints one line a configuration, and exits with 1 where anything is wrong. ``--only``
runs the configurations of these names alone, such as "fsdp2 checkpointed".
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import dtypedoctor

BLOCKS = 16
STEPS = 10


class Plant(nn.Module):
    """Returns its input, once armed with an inf in it."""

    armed = False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            x = x.clone()
            x.view(-1)[7] = float("inf")
        return x


class Block(nn.Module):
    def __init__(self, width: int, *, checkpointed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.plant = Plant()
        self.down = nn.Linear(4 * width, width)
        self.checkpointed = checkpointed

    def _inner(self, x: Tensor) -> Tensor:
        return x + self.down(self.plant(self.act(self.up(self.norm(x)))))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self._inner, x, use_reentrant=False)
        return self._inner(x)


class Job:
    """One configuration: the model, its optimizer, and its parameters as they were."""

    def __init__(
        self, kind: str, device: torch.device, options: argparse.Namespace, *, checkpointed: bool, reshard: bool
    ):
        torch.manual_seed(0)
        model = nn.Sequential(*[Block(options.width, checkpointed=checkpointed) for _ in range(BLOCKS)]).to(device)
        self.plants = [block.plant for block in model]
        dtype = torch.bfloat16 if kind == "ddp" else torch.float32
        self.x = torch.randn(options.rows, options.width, device=device, dtype=dtype)
        self.model: nn.Module = model
        if kind == "ddp":
            devices = [device.index] if device.type == "cuda" else None
            self.model = nn.parallel.DistributedDataParallel(model.to(dtype), device_ids=devices)
        else:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for block in model:
                fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
            fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
        self.kept = [local(p).detach().clone() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    def step(self) -> Tensor:
        loss = self.model(self.x).float().pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def finite(self, losses: list[Tensor]) -> bool:
        return all(bool(t.isfinite().all()) for t in [*losses, *(local(p) for p in self.model.parameters())])

    def restore(self) -> None:
        with torch.no_grad():
            for parameter, kept in zip(self.model.parameters(), self.kept, strict=True):
                local(parameter).copy_(kept)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)


def local(parameter: Tensor) -> Tensor:
    """What this rank holds of a parameter."""
    return getattr(parameter, "_local_tensor", parameter)


def configurations() -> Iterator[tuple[str, bool, bool]]:
    """Kind, whether activations are checkpointed, and whether parameters are freed after the forward pass."""
    for checkpointed in (False, True):
        yield "ddp", checkpointed, False
        for reshard in (True, False):
            yield "fsdp2", checkpointed, reshard


def healthy(job: Job, times: int) -> tuple[int, int, list[str]]:
    """Watched trainings, those with a false finding, and what was said.

    That parameters do not move is true of the replicas: they are bfloat16, and the learning rate is too small for it.
    """
    said: list[str] = []
    false = 0
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            watch = dtypedoctor.watch(job.model, out=f"{folder}/job")
            with watch:
                losses = [job.step() for _ in range(STEPS)]
            found = [f for f in watch.report.findings if f.id != "update-stall"] if watch.report else ["no report"]
            if found and job.finite(losses):
                false += 1
                said.append(str(found[0]))
    return times, false, said


def planted(job: Job, times: int, seed: int) -> tuple[int, int, list[str]]:
    """Trainings with a planted inf, those whose report names another rank or module, and what it said."""
    draw = torch.Generator().manual_seed(seed)
    said: list[str] = []
    wrong = 0
    for _ in range(times):
        rank, block = (int(torch.randint(n, (), generator=draw)) for n in (dist.get_world_size(), BLOCKS))
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        with dtypedoctor.watch(job.model, out=f"{folder[0]}/job"):
            for step in range(3):
                job.plants[block].armed = step == 2 and dist.get_rank() == rank
                job.step()
        job.plants[block].armed = False
        dist.barrier()
        if dist.get_rank() == 0:
            found = told(Path(folder[0]) / "job")
            expected = (rank, f"{block}.plant")
            if (found[0], found[1].removeprefix("module.")) != expected:
                wrong += 1
                said.append(f"expected {expected}, got {found}")
        job.restore()
        dist.barrier()
    return times, wrong, said


def told(directory: Path) -> tuple[int | None, str]:
    """Rank and module of the first finding in the report of a job."""
    command = [sys.executable, "-m", "dtypedoctor", "report", str(directory), "--format", "json"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    )
    findings = json.loads(done.stdout)["findings"] if done.stdout else []
    return (findings[0].get("rank"), findings[0]["fqn"] or "") if findings else (None, "")


def main() -> None:
    """Runs every configuration."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--healthy", type=int, default=50)
    parser.add_argument("--planted", type=int, default=20)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--backend", default="nccl")
    options = parser.parse_args()
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend)
    failed = 0
    for number, (kind, checkpointed, reshard) in enumerate(configurations()):
        name = f"{kind}{' checkpointed' if checkpointed else ''}{' reshard' if reshard else ''}"
        if options.only and name not in options.only:
            continue
        began = time.perf_counter()
        job = Job(kind, device, options, checkpointed=checkpointed, reshard=reshard)
        for _ in range(2):
            job.step()
        runs, false, said = healthy(job, options.healthy)
        counts = torch.tensor([runs, false], device=device)
        dist.all_reduce(counts)
        tried, wrong, misnamed = planted(job, options.planted, number)
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - began
            print(
                f"{name}: false {counts[1]} of {counts[0]}; planted wrong {wrong} of {tried}; {seconds:.0f} s",
                flush=True,
            )
        for line in (said + misnamed)[:4]:
            print(f"  rank {dist.get_rank()}: {line}", flush=True)
        failed += int(counts[1]) + wrong
        del job
    dist.destroy_process_group()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
