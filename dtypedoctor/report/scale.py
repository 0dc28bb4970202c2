"""Where a magnitude stands on the scale of its own dtype."""

import math

from dtypedoctor.dtypes import DTYPES

__all__ = ["fill", "limit"]


def fill(absmax: float | None, dtype: str) -> float | None:
    """The place of ``absmax`` between the smallest normal value of ``dtype`` (0.0) and its largest (1.0), logarithmically.

    Returns None for dtypes without such a scale and where nothing was measured; zero and everything below the smallest
    normal value stand at 0.0.
    """
    known = DTYPES.get(dtype)
    if known is None or absmax is None:
        return None
    if absmax <= known.tiny:
        return 0.0
    return min(1.0, (math.log2(absmax) - math.log2(known.tiny)) / (math.log2(known.max) - math.log2(known.tiny)))


def limit(dtype: str) -> float | None:
    """The largest finite value of ``dtype``, or None if it is not a floating-point dtype."""
    known = DTYPES.get(dtype)
    return known.max if known else None
