"""When two numbers of two runs count as equal."""

from dtypedoctor.dtypes import DTYPES, DType
from dtypedoctor.trace.reader import Trace

__all__ = ["ABSOLUTE", "EPSILONS", "default_tolerance", "drift", "relative_error"]

EPSILONS = 16
"""Roundings of the coarser dtype that two runs may be apart by default. Measured on an untrained two-layer model: float16 and
bfloat16 against float32 stay within 9 of them in the forward pass; gradients, and whatever follows them, drift further."""

ABSOLUTE = 1e-5
"""Losses and norms closer than this count as equal (unless the tolerance is zero): a loss whose terms cancel is all rounding.
It is the absolute tolerance of ``torch.testing.assert_close`` for these dtypes."""

_LARGEST = 0.25
"""More than this is no agreement, whatever the dtype."""


def relative_error(a: float, b: float) -> float:
    """|a - b| / max(|a|, |b|); 0 for two zeros. Between 0 and 1 where the signs are equal."""
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if largest else 0.0


def drift(a: float, b: float, tolerance: float) -> float:
    """The relative error of two losses or norms; 0 where they are closer than :data:`ABSOLUTE` and the tolerance is not 0."""
    return 0.0 if tolerance and abs(a - b) <= ABSOLUTE else relative_error(a, b)


def default_tolerance(a: Trace, b: Trace) -> tuple[float, str]:
    """The relative error that counts as equal where nobody says otherwise, and the reason in words.

    It is :data:`EPSILONS` times the epsilon of the coarsest floating-point dtype that a module of either run returns.
    """
    found = {site.dtype for trace in (a, b) for site in trace.sites.values() if site.kind == "output"}
    coarsest = max((DTYPES[name] for name in found if name in DTYPES), key=_epsilon, default=DTYPES["float32"])
    return min(EPSILONS * coarsest.epsilon, _LARGEST), f"{EPSILONS} times the epsilon of {coarsest.name}"


def _epsilon(dtype: DType) -> float:
    return dtype.epsilon
