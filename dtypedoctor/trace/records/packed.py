"""Packed (quantised) weights beside the operands that are, or are meant to be, these weights made dense."""

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["ComparedOperand", "PackedBits", "PackedWeight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedOperand:
    """An operand that was compared with a packed weight; the observation's ``fqn`` is the module that holds the weight.

    Attributes:
        of: number of the op.
        operand: index over its inputs.
        weight: name of the packed weight.
        dtype: of the operand.
        quant_dtype: dtype that the quantisation state says.
        relative_error: norm of the difference over the norm of the weight; None where it is not finite.
    """

    of: int
    operand: int
    weight: str
    dtype: str
    quant_dtype: str
    relative_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight(ComparedOperand):
    """An operand of a product that has the shape of packed weights of the module, and the one of these that it is closest to.

    Whether the operand is meant to be that weight at all is for the reader to find out.
    """

    KIND: ClassVar[str] = "packed-weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBits(ComparedOperand):
    """An operand of a product, or of an op on the way to one, whose memory was filled in one format and is read in another.

    Its dtype is not the quantisation state's, and its bits are those of the weight in the state's own dtype.
    """

    KIND: ClassVar[str] = "packed-bits"
