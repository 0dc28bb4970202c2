"""Packed weights: whether the matrix that a product really gets is the packed weight that it is meant to be."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import without_autocast
from dtypedoctor.instrument.module_tree import modules_in
from dtypedoctor.instrument.naming import Names, dtype_name, short_name
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.records.execution import PackedBits, PackedWeight

MAX_CHECKS = 400
"""Comparisons in one window."""
MAX_BLOCKS = 512
"""Blocks of a packed weight, of 64 elements mostly, that are decoded and compared."""

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.addmm_.", "aten.bmm.", "aten.baddbmm.", "aten.matmul.", "aten.linear.")
_READERS = (
    *_PRODUCTS,
    "aten._to_copy.",
    "aten.to.",
    "aten.type_as.",
    "aten.copy_.",
    "aten.cat.",
    "aten.mul.",
    "aten.mul_.",
)
"""Ops after which it is too late to see which bits their operand held: what a cast to float16 makes of 1e-16 is 0."""

SAME = 0.1
"""Relative error below which bits are those of the weight; bits of another format give 0.7 and more."""


@dataclass(slots=True)
class _Packed:
    """A packed weight; ``owner`` is the dotted name of the module that holds it."""

    root: int
    owner: str
    name: str
    weight: Tensor
    state: Any
    sample: "_Sample | None" = None


class WeightCheck:
    """Compares the matrix that a product really gets with the packed weight that it is meant to be.

    Whoever dequantized it (bitsandbytes, a Triton or C kernel, hand-written code) and however: the product's operand has the
    shape of the quantization state, and the packed bytes say what should be in it. They are decoded here, blocks from all over
    the matrix, so that neither the time nor the memory that a comparison takes grows with the model.

    A :class:`PackedWeight` is written for each operand of a product, a :class:`PackedBits` for one that holds the bits of a weight in
    another format than its dtype says.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._packed: list[_Packed] = []
        self._left = MAX_CHECKS

    def look_at(self, names: Names) -> None:
        """Finds the packed weights of all known modules."""
        known = {id(packed.state) for packed in self._packed}
        self._packed += [packed for packed in _packed_weights(names) if id(packed.state) not in known]

    def check(self, n: int, op: str, operands: list[Tensor], root: int, fqn: str) -> None:
        """Compares the operands of op ``n``, which runs in module ``fqn``."""
        if not self._packed or not op.startswith(_READERS):
            return
        for index, operand in enumerate(operands):
            if self._left and measurable(operand) and operand.dim() == 2:
                self._compare_bits(n, index, operand.detach(), root, fqn)
                if op.startswith(_PRODUCTS):
                    self._compare(n, index, operand.detach(), root, fqn)

    def _fitting(self, operand: Tensor, root: int, fqn: str) -> list[_Packed]:
        return [p for p in self._packed if p.root == root and _is_near(p.owner, fqn) and _fits(operand, p.state)]

    def _compare_bits(self, n: int, index: int, operand: Tensor, root: int, fqn: str) -> None:
        for packed in self._fitting(operand, root, fqn):
            stored = packed.state.dtype
            if stored == operand.dtype or stored.itemsize != operand.dtype.itemsize:
                continue
            self._left -= 1
            if _relative_error(operand.view(stored), packed) < SAME:
                error = _relative_error(operand, packed)
                bits = PackedBits(
                    of=n,
                    operand=index,
                    weight=packed.name,
                    dtype=dtype_name(operand),
                    quant_dtype=short_name(stored),
                    relative_error=error if isfinite(error) else None,
                )
                self._session.emit(bits, fqn=packed.owner)

    def _compare(self, n: int, index: int, operand: Tensor, root: int, fqn: str) -> None:
        fitting = self._fitting(operand, root, fqn)
        if not fitting:
            return
        self._left -= 1
        errors = [(_relative_error(operand, packed), packed) for packed in fitting]
        error, closest = min(errors, key=lambda found: found[0])
        compared = PackedWeight(
            of=n,
            operand=index,
            weight=closest.name,
            dtype=dtype_name(operand),
            quant_dtype=short_name(closest.state.dtype),
            relative_error=error if isfinite(error) else None,
        )
        self._session.emit(compared, fqn=closest.owner)


def _packed_weights(names: Names) -> Iterator[_Packed]:
    for root, name, tensor, _, _ in names.tensors():
        state = getattr(tensor, "quant_state", None)
        if state is not None and not getattr(state, "packing_format_for_cpu", False):
            yield _Packed(root=root, owner=name.rpartition(".")[0], name=name, weight=tensor.data, state=state)
    for module in (child for top in names.roots for child in modules_in(top)):
        root, fqn = names.find(module) or (-1, "")
        for name, weight, state in packed_attributes(module):
            yield _Packed(root=root, owner=fqn, name=f"{fqn}.{name}", weight=weight, state=state)


def packed_dtypes(names: Names, root: int) -> set[str]:
    """The dtypes that the quantization states of an outermost module say."""
    return {short_name(packed.state.dtype) for packed in _packed_weights(names) if packed.root == root}


def packed_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """Packed bytes that are a plain attribute of a module beside another that is their state: name, bytes, state."""
    held = vars(module)
    states = [value for value in held.values() if _is_state(value)]
    for name, value in held.items() if states else ():
        if isinstance(value, Tensor) and not value.is_floating_point():
            state = next((s for s in states if value.numel() * 2 == s.shape.numel()), None)
            if state is not None:
                yield name, value, state


def _is_state(value: Any) -> bool:
    return type(value).__name__ == "QuantState" and isinstance(getattr(value, "absmax", None), Tensor)


def _is_near(owner: str, fqn: str) -> bool:
    """Whether code in module ``fqn`` may multiply with the weight of module ``owner``: it is the same, above or inside."""
    return not fqn or owner == fqn or owner.startswith(f"{fqn}.") or fqn.startswith(f"{owner}.")


def _fits(operand: Tensor, state: Any) -> bool:
    shape = tuple(state.shape)
    return tuple(operand.shape) in (shape, shape[::-1]) and operand.device == state.absmax.device


def _relative_error(operand: Tensor, packed: _Packed) -> float:
    """Norm of the difference over the norm of the weight, over the elements that are compared; inf where it is not finite."""
    with torch.no_grad(), without_autocast():
        if packed.sample is None:
            packed.sample = _decoded(packed.weight, packed.state)
        sample, shape = packed.sample, tuple(packed.state.shape)
        size = sample.values.norm().clamp_min(torch.finfo(torch.float32).tiny)
        forms = [form for form in (operand, operand.t()) if tuple(form.shape) == shape]
        errors = [float((sample.of(form).float() - sample.values).norm() / size) for form in forms]
    return min((e if isfinite(e) else float("inf") for e in errors), default=float("inf"))


@dataclass(frozen=True, slots=True)
class _Sample:
    """Some blocks of a packed weight: which (shape [blocks]), and their values in float32 (shape [blocks, elements])."""

    blocks: Tensor
    values: Tensor

    def of(self, dense: Tensor) -> Tensor:
        """The same elements of a matrix that has the shape of the weight."""
        count = self.values.shape[1]
        at = self.blocks[:, None] * count + torch.arange(count, device=dense.device)
        columns = dense.shape[1]
        return dense[at // columns, at % columns]


def _decoded(weight: Tensor, state: Any) -> _Sample:
    """Blocks of a packed weight: two codes of 4 bits in each byte, the first in the upper half, times the block's largest magnitude."""
    numel = prod(state.shape)
    size = min(int(state.blocksize), numel)
    count = numel // size
    blocks = torch.linspace(0, count - 1, min(count, MAX_BLOCKS), device=weight.device).long()
    absmax = state.absmax[blocks]
    if state.nested:
        inner = state.state2
        absmax = inner.code[absmax.long()] * inner.absmax[blocks // inner.blocksize] + state.offset
    at = blocks[:, None] * (size // 2) + torch.arange(size // 2, device=weight.device)
    packed = weight.contiguous().view(torch.uint8).flatten()[at]
    codes = torch.stack((packed >> 4, packed & 15), -1).flatten(1).long()
    return _Sample(blocks, state.code.float()[codes] * absmax.float()[:, None])
