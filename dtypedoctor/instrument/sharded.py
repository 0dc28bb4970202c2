"""Which module calls a rank of a job can make again alone: those that issue no collective.

Of ``DistributedDataParallel`` that is the module inside of it, of a program that communicates by itself the outermost module. Under FSDP2
(``fully_shard``) it is each unit that holds no other, and each module between units, as long as their parameters are unsharded: from the
all-gather before a unit's forward to its end, and in the backward pass from the next all-gather to the reduce-scatter. Nothing is gathered here.
What a GPU computes is known later than that, so :mod:`dtypedoctor.instrument.repeated_call` keeps what a unit computed with. FSDP1 keeps its parameters in flat
tensors of its own, and DeepSpeed's ZeRO-3 gathers them inside of each call and notes on the parameters that it does; their modules are not made again.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dtypedoctor._torch_private import (
    HOOKS_OF_SHARDING,
    cast_for_unit,
    class_before_sharding,
    hooks_of,
    marks_of_sharding,
)
from dtypedoctor.instrument.module_tree import children_in, mapped, modules_in, named_tensors, parameters_in

__all__ = [
    "calls_alone",
    "is_of_several",
    "is_sharded",
    "parameter_not_here",
    "unit_set_aside",
]

SHARDING = "torch.distributed.fsdp"
"""The module that holds both generations of FSDP; it is not imported for this."""
_UNCALLED = (nn.ModuleList, nn.ModuleDict)
"""Containers that are never called themselves."""

Given = Callable[[Any, Any], tuple[Any, Any]]
"""Makes of the positional and keyword arguments of a call what the forward is called with."""


def is_of_several() -> bool:
    """Whether this process is a rank of a job."""
    return dist.is_available() and dist.is_initialized()


def is_sharded(module: nn.Module) -> bool:
    """Whether ``module`` is a unit of FSDP2."""
    kind = getattr(sys.modules.get(SHARDING), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def _is_first_generation(module: nn.Module) -> bool:
    kind = getattr(sys.modules.get(SHARDING), "FullyShardedDataParallel", None)
    return kind is not None and isinstance(module, kind)


def _communicates(module: nn.Module) -> bool:
    """Whether calling ``module`` issues collectives that are not in its own forward."""
    return isinstance(module, DistributedDataParallel) or is_sharded(module) or _is_first_generation(module)


def _is_partitioned(module: nn.Module) -> bool:
    """Whether DeepSpeed has partitioned parameters of ``module``: each then has a number of its own."""
    return any(hasattr(parameter, "ds_id") for parameter in parameters_in(module))


def calls_alone(root: nn.Module) -> list[nn.Module]:
    """The outermost ones of those modules in ``root`` that a rank can call alone; of none of them is one inside of another."""
    if _is_first_generation(root) or _is_partitioned(root):
        return []
    inside = (part for part in modules_in(root) if part is not root)
    is_wrapper = isinstance(root, DistributedDataParallel) or type(root) in _UNCALLED
    if not is_wrapper and not any(map(_communicates, inside)):
        return [root]
    return [found for child in children_in(root) for found in calls_alone(child)]


def parameter_not_here(module: nn.Module) -> str:
    """Dotted name in ``module`` of the first parameter of which this rank has only a shard at the moment; empty where it has them all."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    for name, parameter in named_tensors(module, buffers=False):
        is_shard = kind is not None and isinstance(parameter, kind)
        if is_shard or (parameter.numel() and not parameter.untyped_storage().nbytes()):
            return name
    return ""


@contextmanager
def unit_set_aside(module: nn.Module) -> Iterator[Given]:
    """Inside, a unit of FSDP2 is a module as it was before it became one: calling it gathers, frees and registers nothing.

    Yields:
        What makes of a call's arguments those that FSDP2 calls the forward with, by its precision policy; of other modules the same.
    """
    marks = [(part, {name: vars(part)[name] for name in marks_of_sharding(part)}) for part in modules_in(module)]
    unit: Any = module
    kind = type(unit)
    held = [(hooks, list(hooks.items())) for hooks in hooks_of(module)] if is_sharded(module) else []
    given: Given = lambda args, kwargs: (args, kwargs)
    if held:
        cast = cast_for_unit(module)
        given = lambda args, kwargs: cast(*_on_device_of(module, args, kwargs))
    try:
        if held:
            unit.__class__ = class_before_sharding(module)
        for part, values in marks:
            for name in values:
                del vars(part)[name]
        for hooks, items in held:
            for number, hook in items:
                if str(getattr(hook, "__module__", "")).startswith(HOOKS_OF_SHARDING):
                    del hooks[number]
        yield given
    finally:
        unit.__class__ = kind
        for part, values in marks:
            vars(part).update(values)
        for hooks, items in held:
            hooks.clear()
            hooks.update(items)


def _on_device_of(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with CPU tensors on the device of the parameters, where FSDP2 puts what its root is called with."""
    device = next((parameter.device for parameter in parameters_in(module)), None)
    memo: dict[int, Any] = {}

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device) if device is not None and tensor.device.type == "cpu" and tensor.dim() else tensor

    return mapped(args, moved, memo), mapped(kwargs, moved, memo)
