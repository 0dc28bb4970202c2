"""When two numbers of two runs count as equal."""

from dataclasses import dataclass
from math import prod, sqrt

from dtypedoctor.dtypes import DTYPES, DType
from dtypedoctor.trace.events import Site
from dtypedoctor.trace.reader import Trace

__all__ = ["ABSOLUTE", "EPSILONS", "Tolerance", "default_tolerance", "drift", "relative_error"]

EPSILONS = 16
"""Roundings of the coarser dtype that two runs may be apart by default. Measured on an untrained two-layer model: float16 and
bfloat16 against float32 stay within 9 of them in the forward pass; gradients, and whatever follows them, drift further."""

ABSOLUTE = 1e-5
"""Losses and norms closer than this count as equal (unless the tolerance is zero): a loss whose terms cancel is all rounding.
It is the absolute tolerance of ``torch.testing.assert_close`` for these dtypes."""

_SUMS = 2
"""Standard deviations of the rounding error of a sum that two orders of adding it may be apart."""

_LARGEST = 0.25
"""More than this is no agreement, whatever the dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The largest relative error that counts as equal.

    Attributes:
        base: in the first training step.
        grows: whether it grows in proportion to the number of the step: each step adds its own rounding to the weights.
        reason: why it is that, in words.
    """

    base: float
    grows: bool
    reason: str

    def at(self, step: int) -> float:
        """The largest relative error that counts as equal in training step ``step``, counted from 1."""
        return min(self.base * max(step, 1), max(_LARGEST, self.base)) if self.grows else self.base


def relative_error(a: float, b: float) -> float:
    """|a - b| / max(|a|, |b|); 0 for two zeros. Between 0 and 1 where the signs are equal."""
    largest = max(abs(a), abs(b))
    return abs(a - b) / largest if largest else 0.0


def drift(a: float, b: float, tolerance: float) -> float:
    """The relative error of two losses or norms; 0 where they are closer than :data:`ABSOLUTE` and the tolerance is not 0."""
    return 0.0 if tolerance and abs(a - b) <= ABSOLUTE else relative_error(a, b)


def default_tolerance(a: Trace, b: Trace) -> Tolerance:
    """What counts as equal where nobody says otherwise: what rounding alone may do.

    Values are rounded to the coarsest floating-point dtype that a module of either run returns; :data:`EPSILONS` of its
    epsilons are accepted. Sums are accumulated in float32 (in float64 where that is the coarsest). In another order, or on another
    kind of processor, a sum of n terms differs by about sqrt(n) epsilons, and a value goes through as many sums as there are modules.
    """
    sites = [site for trace in (a, b) for site in trace.sites.values() if site.kind == "output"]
    found = {site.dtype for site in sites}
    coarsest = max((DTYPES[name] for name in found if name in DTYPES), key=_epsilon, default=DTYPES["float32"])
    summed = min((coarsest, DTYPES["float32"]), key=_epsilon)
    terms = max(map(_terms, sites), default=1)
    depth = max(len({site.fqn for site in t.sites.values() if site.kind == "output"}) for t in (a, b))
    stored, added = EPSILONS * coarsest.epsilon, _SUMS * sqrt(terms * depth) * summed.epsilon
    if stored >= added:
        reason = f"{EPSILONS} times the epsilon of {coarsest.name}"
    else:
        reason = f"what {summed.name} rounding does to sums of up to {terms:,} terms in {depth:,} modules"
    return Tolerance(
        base=min(max(stored, added), _LARGEST), grows=True, reason=f"{reason}, times the number of the step"
    )


def _terms(site: Site) -> int:
    """The longest sum behind a module output or the gradients of its weights: over features, or over everything else."""
    known = [max(size, 1) for size in site.shape]
    return max(known[-1], prod(known[:-1])) if known else 1


def _epsilon(dtype: DType) -> float:
    return dtype.epsilon
