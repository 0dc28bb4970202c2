"""Measures tensors: largest finite magnitude, and how many elements are NaN or inf."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Largest magnitude over the finite elements of a tensor, and the counts of the others."""

    absmax: float
    num_nan: int = 0
    num_posinf: int = 0
    num_neginf: int = 0

    @property
    def finite(self) -> bool:
        """Whether every element is finite."""
        return not (self.num_nan or self.num_posinf or self.num_neginf)


def measurable(value: object) -> bool:
    """Whether ``value`` is a dense floating-point tensor with data behind it (not packed, meta, fake or sparse)."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.layout is torch.strided
        and value.device.type != "meta"
        and type(value) in _DENSE_TYPES
    )


_DENSE_TYPES = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})


def measure(tensors: Sequence[Tensor]) -> list[Extent]:
    """Measures a batch of floating-point tensors of any shape on one device.

    Only the maximum norm is computed for all of them, and read back once for the whole batch; the counting pass is
    made only for tensors whose norm is not finite (the maximum norm carries NaN and inf through).
    """
    if not tensors:
        return []
    with torch.no_grad(), torch._C._DisableAutocast():
        norms = torch.stack([_max_norm(t.detach()) for t in tensors]).tolist()
        return [
            _count(t.detach()) if not isfinite(n) else Extent(absmax=n) for t, n in zip(tensors, norms, strict=True)
        ]


def _max_norm(tensor: Tensor) -> Tensor:
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    if tensor.element_size() == 1:
        tensor = tensor.float()
    return torch.linalg.vector_norm(tensor, inf).to(torch.float64)


def _count(tensor: Tensor) -> Extent:
    values = tensor.float() if tensor.element_size() == 1 else tensor
    finite = torch.where(torch.isfinite(values), values, torch.zeros((), dtype=values.dtype, device=values.device))
    counts = torch.stack([torch.isnan(values).sum(), torch.isposinf(values).sum(), torch.isneginf(values).sum()])
    nan, posinf, neginf = counts.tolist()
    return Extent(absmax=float(_max_norm(finite)), num_nan=nan, num_posinf=posinf, num_neginf=neginf)


def tensors_in(value: object, path: str = "", depth: int = 0) -> Iterable[tuple[str, Tensor]]:
    """Every measurable tensor inside a structured value with its path, e.g. ``0``, ``logits`` or ``past.1``.

    Tuples, lists, mappings (transformers' outputs are mappings) are walked to a depth of 3.
    """
    if isinstance(value, Tensor):
        if measurable(value):
            yield path, value
        return
    if depth == 3 or value is None:
        return
    if isinstance(value, (list, tuple)):
        items: Iterable[tuple[object, object]] = enumerate(value)
    elif hasattr(value, "items") and hasattr(value, "keys"):
        items = value.items()
    else:
        return
    for key, item in items:
        yield from tensors_in(item, f"{path}.{key}" if path else str(key), depth + 1)
