"""Compares the matrix that a product really gets with the packed weight that it is meant to be.

Whoever dequantised it (bitsandbytes, a Triton or C kernel, hand-written code) and however: the product's operand has the
shape of the quantisation state, and bitsandbytes' own dequantisation in float32 says what should be in it.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor.instrument.naming import Names, dtype_name
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.events import Observation
from dtypedoctor.trace.writer import TraceWriter

MAX_CHECKS = 400
"""Comparisons in one window; each costs a pass over a matrix."""

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.addmm_.", "aten.bmm.", "aten.baddbmm.", "aten.matmul.", "aten.linear.")
_CASTS = ("aten._to_copy.",)

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
    dense: Tensor | None = None


class WeightCheck:
    """Compares each operand that has the shape of a packed weight.

    An :class:`Observation` of kind ``packed-bits`` (``of``, ``operand``, ``weight``, ``dtype``, ``quant_dtype``) says that an
    operand of a product or cast is typed as another dtype than the quantisation state's and holds the bits of that weight in the
    state's own: memory that was filled in one format and is read in another. One of kind ``packed-weight`` is written for each
    operand of a product.

    Its values: ``of`` (number of the op), ``operand`` (index over its inputs), ``weight`` (name of the packed weight that it is
    closest to, among those of the module), ``dtype`` and ``quant_dtype``, ``relative_error`` (norm of the difference over the
    norm of the weight; None where it is not finite). Whether the operand is meant to be that weight at all is for the
    reader to find out.
    """

    def __init__(self, writer: TraceWriter, position: Position) -> None:
        self._writer = writer
        self._position = position
        self._packed: list[_Packed] = []
        self._left = MAX_CHECKS

    def look_at(self, names: Names) -> None:
        """Finds the packed weights of all known modules."""
        known = {id(packed.state) for packed in self._packed}
        self._packed += [packed for packed in _packed_weights(names) if id(packed.state) not in known]

    def check(self, n: int, op: str, operands: list[Tensor], root: int, fqn: str) -> None:
        """Compares the operands of op ``n``, which runs in module ``fqn``."""
        if not self._packed or not op.startswith(_PRODUCTS + _CASTS):
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
                read = {"weight": packed.name, "dtype": dtype_name(operand), "quant_dtype": _name(stored)}
                self._write("packed-bits", packed.owner, {"of": n, "operand": index, **read})

    def _compare(self, n: int, index: int, operand: Tensor, root: int, fqn: str) -> None:
        fitting = self._fitting(operand, root, fqn)
        if not fitting:
            return
        self._left -= 1
        errors = [(_relative_error(operand, packed), packed) for packed in fitting]
        error, closest = min(errors, key=lambda found: found[0])
        values = {
            "of": n,
            "operand": index,
            "weight": closest.name,
            "dtype": dtype_name(operand),
            "quant_dtype": _name(closest.state.dtype),
            "relative_error": error if isfinite(error) else None,
        }
        self._write("packed-weight", closest.owner, values)

    def _write(self, kind: str, owner: str, values: dict[str, Any]) -> None:
        position = self._position
        self._writer.write(
            Observation(
                n=self._writer.next_n(), step=position.step, call=position.call, phase=position.phase,
                kind=kind, fqn=owner, values=values,
            )
        )  # fmt: skip


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _packed_weights(names: Names) -> Iterator[_Packed]:
    for root, name, tensor, _, _ in names.tensors():
        state = getattr(tensor, "quant_state", None)
        if state is not None and not getattr(state, "packing_format_for_cpu", False):
            yield _Packed(root=root, owner=name.rpartition(".")[0], name=name, weight=tensor.data, state=state)
    for module in (child for top in names.roots for child in top.modules()):
        root, fqn = names.find(module) or (-1, "")
        for name, weight, state in packed_attributes(module):
            yield _Packed(root=root, owner=fqn, name=f"{fqn}.{name}", weight=weight, state=state)


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
    if packed.dense is None:
        packed.dense = _dense(packed.weight, packed.state)
    dense = packed.dense
    with torch.no_grad(), torch._C._DisableAutocast():
        size = dense.norm().clamp_min(torch.finfo(torch.float32).tiny)
        candidates = [form for form in (dense, dense.t()) if form.shape == operand.shape]
        errors = [float((operand.float() - form).norm() / size) for form in candidates]
    return min((e if isfinite(e) else float("inf") for e in errors), default=float("inf"))


def _dense(weight: Tensor, state: Any) -> Tensor:
    """The matrix in float32, by bitsandbytes itself."""
    from bitsandbytes.functional import dequantize_4bit  # loaded already: it made the state

    wide = copy.copy(state)
    wide.dtype = torch.float32
    with torch.no_grad():
        return dequantize_4bit(weight.reshape(-1, 1), wide).reshape(tuple(state.shape))
