"""Tensors whose values can be read though they are no plain dense ones: of a class of their own, spread, sparse, nested, complex."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtypedoctor._torch_private import (
    DisableTorchFunction,
    is_plain_inside,
    is_wrapped,
    jagged_values,
    kind_of,
    local_shard,
    stored_values,
    unwrapped,
)
from dtypedoctor.instrument.statistics import is_spread, measurable, modes_are_on, out_of_their_sight

__all__ = ["Missed", "readable", "values_of", "wants_gradient"]

_NOT_PLAIN = "its values are not plain memory, and its class's own code would have to run to read them"
_CAPTURED = "nothing can be read while a CUDA graph is captured; run once without the graph to have it measured"
_LAYOUT = "its layout is none that can be read"


_WHOLE = frozenset({torch.int64, torch.int32, torch.bool, torch.uint8})


class Missed(NamedTuple):
    """Something that cannot be measured: the name of its type, and why."""

    type: str
    why: str


def readable(tensor: Tensor) -> Tensor | Missed | None:
    """The values of ``tensor`` as a measurable tensor on the same memory; why not; or None where it holds no floats.

    No code of the tensor's class runs. A DTensor gives what this process holds of it, a sparse tensor the values that it stores,
    a complex one real and imaginary parts, one inside of ``vmap`` or ``grad`` what is behind it. Never communicates.
    """
    if type(tensor) is Tensor and tensor.dtype in _WHOLE:
        return None
    if modes_are_on():
        with out_of_their_sight():
            return readable(tensor)
    with DisableTorchFunction(), torch.no_grad():
        values = _of_class(tensor)
        if isinstance(values, Missed):
            return values
        while is_wrapped(values):
            values = unwrapped(values)
        if values.is_meta or not (values.is_floating_point() or values.is_complex()):
            return None
        if values.is_cuda and torch.cuda.is_current_stream_capturing():
            return Missed(type(tensor).__name__, _CAPTURED)
        found = _dense(values)
        return found if found is not None and measurable(found) else Missed(type(tensor).__name__, _LAYOUT)


def values_of(tensor: Tensor) -> Tensor | None:
    """The values of ``tensor`` as a measurable tensor on the same memory; None where it cannot be measured, or holds no floats."""
    found = tensor if measurable(tensor) else readable(tensor)
    return found if isinstance(found, Tensor) else None


def wants_gradient(tensor: Tensor) -> bool:
    """Whether a gradient of ``tensor`` will come that a hook can see: it is in the graph, and no leaf, where the hook would stay."""
    if type(tensor) is not Tensor:
        with DisableTorchFunction():
            return tensor.requires_grad and not tensor.is_leaf
    return not is_wrapped(tensor) and tensor.requires_grad and not tensor.is_leaf


def _of_class(tensor: Any) -> Any:
    """The tensor behind one of a class of its own, on no device where there is no data at all; or why it cannot be had."""
    if is_wrapped(tensor):
        return tensor
    if is_spread(tensor):
        tensor = local_shard(tensor)
    kind = type(tensor)
    if is_plain_inside(kind):
        return Tensor.detach(tensor)
    of_torch = kind_of(kind)
    if of_torch == "fake":
        return torch.empty(0, device="meta")
    if of_torch == "async" and tensor.completed:
        return _of_class(tensor.elem)
    if of_torch == "nested" and (values := jagged_values(tensor)) is not None:
        return Tensor.detach(values)
    return Missed(kind.__name__, _NOT_PLAIN)


def _dense(tensor: Tensor) -> Tensor | None:
    if tensor.is_nested:
        tensor = tensor.values()
    elif tensor.layout is torch.sparse_coo:
        tensor = stored_values(tensor)
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        tensor = tensor.values()
    elif tensor.layout is not torch.strided:
        return None
    if tensor.is_complex():
        return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    return tensor.detach()
