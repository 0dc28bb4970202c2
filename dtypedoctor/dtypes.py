"""What each dtype can hold, without torch.

Limits are those of IEEE 754 binary16/32/64, of bfloat16 (8 exponent bits, 7 fraction bits) and of the OCP 8-bit formats.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """A floating-point format.

    Attributes:
        name: torch's name without the ``torch.`` prefix, e.g. ``float16``.
        short: the name used in narrow tables, e.g. ``f16``.
        bits: storage size in bits.
        max: largest finite value.
        tiny: smallest positive normal value.
        smallest: smallest positive subnormal value; below half of it everything rounds to zero.
        epsilon: distance from 1.0 to the next larger value.
    """

    name: str
    short: str
    bits: int
    max: float
    tiny: float
    smallest: float
    epsilon: float


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType(name="float64", short="f64", bits=64, max=1.7976931348623157e308, tiny=2.0**-1022, smallest=2.0**-1074,
              epsilon=2.0**-52),
        DType(name="float32", short="f32", bits=32, max=3.4028234663852886e38, tiny=2.0**-126, smallest=2.0**-149,
              epsilon=2.0**-23),
        DType(name="bfloat16", short="bf16", bits=16, max=3.3895313892515355e38, tiny=2.0**-126, smallest=2.0**-133,
              epsilon=2.0**-7),
        DType(name="float16", short="f16", bits=16, max=65504.0, tiny=2.0**-14, smallest=2.0**-24, epsilon=2.0**-10),
        DType(name="float8_e5m2", short="f8e5", bits=8, max=57344.0, tiny=2.0**-14, smallest=2.0**-16, epsilon=2.0**-2),
        DType(name="float8_e4m3fn", short="f8e4", bits=8, max=448.0, tiny=2.0**-6, smallest=2.0**-9, epsilon=2.0**-3),
    )
}  # fmt: skip

HALF = frozenset({"float16", "bfloat16"})
"""The 16-bit formats that models are trained in."""


WHOLE = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})
"""Dtypes of whole numbers and truth values."""

DTYPE_WORDS = (
    "dtype", "scalar type", "ScalarType", "same type", "bias type", "must have the type", "not implemented for '",
    "Half", "BFloat16", "Float8", "ComplexFloat", "ComplexDouble",
)  # fmt: skip
"""Words by which torch's messages about dtypes are recognized."""

_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def parts_of(dtype: str) -> str:
    """The dtype of the real and imaginary parts of a complex one; any other as it is."""
    return _PARTS.get(dtype, dtype)


def short_name(dtype: str) -> str:
    """The name of ``dtype`` for narrow tables; names that are not floating point are returned as they are."""
    known = DTYPES.get(dtype)
    return known.short if known else dtype


def headroom(absmax: float, dtype: str) -> float | None:
    """How many times ``absmax`` still fits below the largest value of ``dtype``.

    Returns None where the question has no answer: an integer dtype, or ``absmax`` of zero.
    """
    known = DTYPES.get(dtype)
    if known is None or absmax <= 0.0:
        return None
    return known.max / absmax
