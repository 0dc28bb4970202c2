"""Makes a stage of a scenario one of several processes: joins the group and wraps the model."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed as dist
from torch import nn

from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.recorder import residual_blocks
from dtypedoctor.scenario.model import Distributed, Grpo, Sft
from dtypedoctor.trace.ranks import member
from dtypedoctor.workloads.context import Context

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}


def take_device(device: torch.device) -> None:
    """Gives this process, if it is one of several, a GPU of its own.

    Raises:
        UsageError: there are not enough of them.
    """
    here = member()
    if here is None or device.type != "cuda":
        return
    count = torch.cuda.device_count()
    if here.local_rank >= count:
        raise UsageError(
            f"{here.world_size} processes need a CUDA device each, and there are {count}", "Add `--device cpu`."
        )
    torch.cuda.set_device(here.local_rank)


@contextmanager
def parallel(context: Context) -> Iterator[None]:
    """Inside, ``context.model`` is wrapped as the scenario asks, and this process belongs to the group of all ranks."""
    spec = context.scenario.distributed
    here = member()
    if spec is None or here is None:
        yield
        return
    context.rank = here.rank
    dist.init_process_group(BACKENDS[context.device.type])
    try:
        model = context.built.model
        if spec.strategy == "fsdp":
            _shard(model, spec)
        elif isinstance(context.stage.workload, (Sft, Grpo)):
            pass  # the trainer finds the group, and wraps the model itself
        elif any(parameter.requires_grad for parameter in model.parameters()):
            context.wrapped = nn.parallel.DistributedDataParallel(model)
            context.instruments.name_as(context.wrapped, model)
        yield
    finally:
        context.wrapped = None
        dist.destroy_process_group()


def _shard(model: nn.Module, spec: Distributed) -> None:
    from torch.distributed import fsdp

    names = (spec.param_dtype, spec.reduce_dtype, spec.output_dtype)
    param, reduce, output = (getattr(torch, name) if name is not None else None for name in names)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)
    blocks = residual_blocks(model) - {id(model)}
    for module in [module for module in model.modules() if id(module) in blocks]:
        fsdp.fully_shard(module, mp_policy=policy)
    fsdp.fully_shard(model, mp_policy=policy)
