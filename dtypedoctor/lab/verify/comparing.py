"""Compares a tensor with what it should be, in units of the dtype's rounding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dtypedoctor.lab.verify.verdicts import (
    CAST,
    DECLARED,
    IDENTICAL,
    MERGE,
    MERGED,
    REQUANTIZED,
    ROUNDED,
    SHAPE,
    UNQUANTIZED,
    UPDATE,
    VALUES,
    Difference,
)
from dtypedoctor.lab.verify.weights import Update, Weight, widest_spacing

_CHUNK = 1 << 22
"""Elements that are compared at a time, in float64."""
_STEP = 1 + 2**-4
"""How many times as far from the reference as the nearest codes quantized weights may be: their scales are rounded too."""


@dataclass(slots=True)
class Distance:
    """How far two tensors of one shape are apart.

    Attributes:
        units: the largest difference, in units of a dtype's rounding at the larger of the two values.
        differing: how many elements differ.
        size: norm of the difference over norm of the first.
        overflowed: elements that are finite in the first only.
        flushed: elements that are 0 in the second only.
    """

    units: float = 0.0
    differing: int = 0
    size: float = 0.0
    overflowed: int = 0
    flushed: int = 0


def distance(reference: Tensor, other: Tensor, dtype: torch.dtype) -> Distance:
    """Measures how far ``other`` is from ``reference``, where a unit is the spacing of ``dtype``."""
    info, apart, squares, norm = torch.finfo(dtype), Distance(), 0.0, 0.0
    first, second = reference.reshape(-1), other.reshape(-1)
    for begin in range(0, first.numel(), _CHUNK):
        a, b = first[begin : begin + _CHUNK].double(), second[begin : begin + _CHUNK].double()
        both, differing = a.isfinite() & b.isfinite(), (a != b) & ~(a.isnan() & b.isnan())
        error = torch.where(both, (a - b).abs(), 0.0)
        units = error / (torch.maximum(a.abs(), b.abs()).clamp(min=info.tiny) * info.eps)
        apart.units = max(
            apart.units, float(torch.where(differing & ~both, float("inf"), units).nan_to_num(0.0, float("inf")).max())
        )
        apart.differing += int(differing.sum())
        apart.overflowed += int((a.isfinite() & ~b.isfinite()).sum())
        apart.flushed += int(((a != 0) & (b == 0)).sum())
        squares += float(error.square().sum())
        norm += float(torch.where(both, a, 0.0).square().sum())
    apart.size = (squares / norm) ** 0.5 if norm else float(squares > 0)
    return apart


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and every bit are equal, NaN included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def compare(name: str, reference: Weight, saved: Weight, stored: torch.dtype | None = None) -> Difference:
    """Compares the weight that a model computes with to the one that was trained.

    Args:
        name: of the tensor.
        reference: that was trained, with its adapters where the saved one has none.
        saved: as it is loaded.
        stored: its dtype in the file, through which it has gone.

    Raises:
        NotComparableError: one of the two cannot be read.
    """
    was, now = reference.dense(), saved.dense()
    if was.shape != now.shape:
        return Difference(tensor=name, kind=SHAPE, said=f"{list(was.shape)} was trained, {list(now.shape)} is loaded")
    update, added = reference.update(), saved.update()
    if added is not None:
        return _merged(name, saved, reference, added, stored)
    if update is not None:
        return _merged(name, reference, saved, update, stored)
    if saved.packing and not reference.packing:
        # Compares quantized values with dense ones: they may be as far away as the nearest codes are
        size = distance(was, now, torch.float32).size
        step = distance(was, saved.requantized(was), torch.float32).size
        said = f"off by {_percent(size)}, where the nearest {saved.packing} codes are off by {_percent(step)}"
        return Difference(tensor=name, kind=REQUANTIZED if size <= step * _STEP else VALUES, said=said, size=size)
    if not (was.is_floating_point() and now.is_floating_point()):
        differing = int((was != now).sum())
        kind = VALUES if differing else IDENTICAL
        return Difference(
            tensor=name, kind=kind, said=f"{differing:,} of {was.numel():,} values differ" if differing else ""
        )
    compared = _dense(name, was, now, stored, repacked=reference.packing != saved.packing)
    if compared.kind == VALUES and _is_unquantized(now, reference):
        compared.kind = UNQUANTIZED
    return compared


def _is_unquantized(dense: Tensor, packed: Weight) -> bool:
    """Whether quantizing dense values leads to the packed ones, or nearly: scales may be rounded, too."""
    if not packed.packing:
        return False
    was = packed.dense()
    again = distance(was, packed.requantized(dense), torch.float32)
    return again.size < distance(was, dense, torch.float32).size / 4


def _dense(name: str, was: Tensor, now: Tensor, stored: torch.dtype | None, *, repacked: bool) -> Difference:
    through = stored if stored is not None and stored.is_floating_point else now.dtype
    narrow = widest_spacing(was.dtype, now.dtype, through)
    apart = Distance() if bits_equal(was, now) else distance(was, now, narrow)
    if not apart.differing:
        return Difference(tensor=name, kind=IDENTICAL)
    compared = Difference(tensor=name, kind=VALUES, size=apart.size)
    compared.said = f"{apart.differing:,} of {was.numel():,} values differ"
    if bits_equal(was.to(through).to(now.dtype), now):
        compared.said = f"the cast to {_short(narrow)} changes {apart.differing:,} of {was.numel():,} values"
        # A cast that keeps the digits of each value moves none by more than half a unit
        is_rounded = not apart.overflowed and apart.size <= torch.finfo(narrow).eps / 2
        is_whole_in_file = torch.finfo(through).eps <= torch.finfo(was.dtype).eps and through != now.dtype
        compared.kind = CAST if not is_rounded else DECLARED if is_whole_in_file else ROUNDED
    elif (was.dtype != now.dtype or repacked) and apart.units <= 1:
        compared.kind = ROUNDED  # a cast that truncates, or a dequantization that rounds elsewhere
    if apart.overflowed:
        compared.said += f": {apart.overflowed:,} become inf or NaN"
    elif compared.kind == CAST:
        compared.said += f": {apart.flushed:,} become 0, and the whole is off by {_percent(apart.size)}"
    else:
        compared.said += (
            f", by up to {apart.units:.3g} units of {_short(narrow)}'s rounding ({_percent(apart.size)} of the whole)"
        )
    return compared


def _merged(name: str, unmerged: Weight, merged: Weight, update: Update, stored: torch.dtype | None) -> Difference:
    """Compares with W + s·BA: each element within the rounding of product and sum, and most of the update there."""
    was, values = unmerged.dense(), merged.dense()
    base, delta, now = was.double(), update.delta, values.double()
    wanted = base + delta
    error, length = now - wanted, float(delta.norm())
    if not length:
        return _dense(name, was, values, stored, repacked=True)
    lost, moved = float(error.norm()) / length, now - base
    arrived = float((moved * delta).sum()) / length**2
    compared = Difference(tensor=name, kind=MERGED, size=float(error.norm() / wanted.norm()))
    narrow = widest_spacing(was.dtype, values.dtype, stored or was.dtype)
    if merged.packing:
        step = merged.requantized(wanted.to(was.dtype)).double() - wanted
        is_right = float(error.norm()) <= float(step.norm()) * _STEP
    else:
        eps, of_update = torch.finfo(narrow).eps, torch.finfo(update.dtype).eps
        allowed = eps * (torch.maximum(wanted.abs(), base.abs()) + delta.abs()) + 2 * of_update * delta.abs()
        allowed += 16 * torch.finfo(torch.float32).eps * update.magnitude + torch.finfo(narrow).tiny
        is_right = bool((error.abs() <= allowed).all())
    if not is_right:
        # Where a multiple of the update explains the weight, the number of times says what has happened
        rest = float((moved - arrived * delta).norm()) / length
        is_multiple = rest <= max(0.1, abs(arrived) / 10)
        compared.kind = UNQUANTIZED if _is_unquantized(now - delta, unmerged) else MERGE
        compared.said = (
            f"it holds W + {arrived:.3g} times the update"
            if is_multiple
            else f"it is off by {lost:.3g} times the update's norm"
        )
    elif lost**2 >= 0.5:  # half of the update's squares: it is nearer to no merge than to a whole one
        compared.kind = UPDATE
        to = merged.packing or _short(narrow)
        compared.said = f"rounding to {to} moves it by {lost:.2g} times the update's norm; {_percent(arrived)} of the update arrives"
    else:
        compared.said = f"rounding is {_percent(lost)} of the update"
    return compared


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 10 else f"{share:.3g} times"
