"""Follows an operand that is 0 and would not be in float32 back to the operator, number or tensor of which rounding made 0."""

from collections.abc import Iterable
from dataclasses import dataclass

from dtypedoctor.diagnosis.births import ancestry
from dtypedoctor.diagnosis.ops import OpGraph, overload_free
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.events import Op, TensorNote

__all__ = ["Vanished", "is_zero_in", "overflow_behind", "vanished"]

GUARDS = frozenset(
    {"add", "sub", "rsub", "clamp", "clamp_min", "maximum", "full", "full_like", "scalar_tensor", "fill"}
)
"""Ops whose number is a guard, or is all that they write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vanished:
    """What rounding made 0 of.

    Attributes:
        tensor: the operand, where the walk ends.
        maker: the op that rounded; None where the tensor was made outside of the op trace, or of a number.
        number: the number in the code that is 0 in the dtype of the op's result, as text; None where it is a computed value.
    """

    tensor: TensorNote
    maker: Op | None
    number: str | None = None


def vanished(graph: OpGraph, op: Op) -> Vanished | None:
    """What rounding made 0 of behind an operand of ``op``; None where no operand is 0 that would not be."""
    tensor = _lost(op.inputs)
    while tensor is not None:
        maker = graph.producer(tensor)
        if maker is None or maker.n >= op.n:
            return Vanished(tensor=tensor, maker=None)
        number = next(
            (text for text in maker.scalars if overload_free(maker.op) in GUARDS and is_zero_in(text, maker)), None
        )
        before = _lost(maker.inputs)
        if number is not None or before is None or before.id == tensor.id:
            return Vanished(tensor=tensor, maker=maker, number=number)
        tensor = before
    return None


def overflow_behind(graph: OpGraph, op: Op) -> Op | None:
    """The op whose overflow made 0 of an operand of ``op``: the reciprocal root of inf is 0, and so is what a norm then returns."""
    found = vanished(graph, op)
    if found is None or found.maker is None or all(t.finite for t in found.maker.inputs):
        return None
    bad = next(t for t in found.maker.inputs if not t.finite)
    producer = graph.producer(bad)
    return next(iter(ancestry(graph, producer).computed), None) if producer is not None else None


def is_zero_in(text: str, op: Op) -> bool:
    """Whether a number other than 0 rounds to 0 in the dtype of the op's result."""
    known = DTYPES.get(op.outputs[0].dtype) if op.outputs else None
    try:
        value = abs(float(text))
    except ValueError:
        return False
    return known is not None and 0.0 < value <= known.smallest / 2


def _lost(tensors: Iterable[TensorNote]) -> TensorNote | None:
    """The operand that is 0 and would not be; a lone number, or one with a name, before what was computed."""
    lost = [t for t in tensors if t.lost]
    return next((t for t in lost if t.name is not None or not t.shape), next(iter(lost), None))
