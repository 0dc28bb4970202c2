"""Tensors whose values can be read though they are no plain dense ones: of a class of their own, spread, sparse, nested, complex."""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

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
    with torch._C.DisableTorchFunction(), torch.no_grad():
        values = _of_class(tensor)
        if isinstance(values, Missed):
            return values
        while is_functorch_wrapped_tensor(values):
            values = get_unwrapped(values)
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
        with torch._C.DisableTorchFunction():
            return tensor.requires_grad and not tensor.is_leaf
    return not is_functorch_wrapped_tensor(tensor) and tensor.requires_grad and not tensor.is_leaf


def _of_class(tensor: Any) -> Any:
    """The tensor behind one of a class of its own, on no device where there is no data at all; or why it cannot be had."""
    if is_functorch_wrapped_tensor(tensor):
        return tensor
    if is_spread(tensor):
        tensor = tensor._local_tensor
    kind = type(tensor)
    if kind.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl:
        return Tensor.detach(tensor)
    if _is(kind, "torch._subclasses.fake_tensor", "FakeTensor"):
        return torch.empty(0, device="meta")
    if _is(kind, "torch.distributed._functional_collectives", "AsyncCollectiveTensor") and tensor.completed:
        return _of_class(tensor.elem)
    if _is(kind, "torch.nested._internal.nested_tensor", "NestedTensor") and tensor._lengths is None:
        return Tensor.detach(tensor._values)
    return Missed(kind.__name__, _NOT_PLAIN)


def _is(kind: type, module: str, name: str) -> bool:
    return kind is getattr(sys.modules.get(module), name, None)


def _dense(tensor: Tensor) -> Tensor | None:
    if tensor.is_nested:
        tensor = tensor.values()
    elif tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        tensor = tensor.values()
    elif tensor.layout is not torch.strided:
        return None
    if tensor.is_complex():
        return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    return tensor.detach()
