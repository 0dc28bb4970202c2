"""Gives parameters and buffers of live modules float32 storage, and takes it back."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import parameters_of
from dtypedoctor.corrections.float32_frames import is_narrow, set_nominal


@dataclass(frozen=True, slots=True, kw_only=True)
class Widened:
    """What was changed.

    Attributes:
        tensors: how many parameters and buffers got float32 storage.
        shared: how many did not because a module outside holds them, too (a tied embedding).
        put_back: restores every dtype; values trained since are rounded to it.
    """

    tensors: int
    shared: int
    put_back: Callable[[], None]


def widen_storage(model: nn.Module, modules: Sequence[nn.Module]) -> Widened:
    """Gives the own parameters and buffers of ``modules`` float32 storage, with the dtype they had as the nominal one.

    bitsandbytes' 4-bit linears keep their packed weights and dequantise to float32.

    Args:
        model: all of it, to find out which tensors are shared.
        modules: modules of it; only what they hold directly is changed.
    """
    inside = {id(module) for module in modules}
    owners: defaultdict[int, set[int]] = defaultdict(set)
    for module in model.modules():
        for tensor in _held(module):
            owners[id(tensor)].add(id(module))
    found = {id(tensor): tensor for module in modules for tensor in _held(module) if is_narrow(tensor)}
    shared = {key for key in found if not owners[key] <= inside}
    dtypes = {key: tensor.dtype for key, tensor in found.items() if key not in shared}
    for key, dtype in dtypes.items():
        _cast(found[key], torch.float32, nominal=dtype)
    restore = [undo for module in modules for undo in _compute_in_float32(module)]

    def put_back() -> None:
        for key, dtype in dtypes.items():
            _cast(found[key], dtype, nominal=None)
        while restore:
            restore.pop()()

    return Widened(tensors=len(dtypes), shared=len(shared), put_back=put_back)


def _held(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _cast(tensor: Tensor, dtype: torch.dtype, nominal: torch.dtype | None) -> None:
    gradient, tensor.grad = tensor.grad, None  # torch refuses a gradient of another dtype than its tensor
    tensor.data = tensor.data.to(dtype)
    set_nominal(tensor, nominal)
    if gradient is not None:
        tensor.grad = gradient.to(dtype)


def _compute_in_float32(module: nn.Module) -> list[Callable[[], None]]:
    """Lets a 4-bit linear dequantise to float32 and multiply in it; gives what undoes that."""
    state: Any = getattr(parameters_of(module).get("weight"), "quant_state", None)
    if state is None:
        return []
    undo = [_set(state, "dtype", torch.float32)]
    wanted = {
        "compute_dtype": torch.float32,
        "compute_type_is_set": True,  # else the first input decides anew
        "support_avx512bf16_for_cpu": False,  # else a first forward in evaluation mode repacks the weight to bfloat16
    }
    return undo + [_set(module, name, value) for name, value in wanted.items() if hasattr(module, name)]


def _set(owner: Any, name: str, value: object) -> Callable[[], None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)
