"""What the comparison of two traces finds out, as values, and when two numbers of two runs count as equal."""

from dataclasses import dataclass
from enum import StrEnum
from math import prod, sqrt
from operator import attrgetter

from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.events import Sample, Site
from dtypedoctor.trace.model import Trace

EPSILONS = 16
"""Roundings of the coarser dtype that two runs may be apart by default. Measured on an untrained two-layer model: float16 and
bfloat16 against float32 stay within 9 of them in the forward pass; gradients, and whatever follows them, drift further."""

ABSOLUTE = 1e-5
"""Losses and norms closer than this count as equal (unless the tolerance is zero): a loss whose terms cancel is all rounding.
It is the absolute tolerance of ``torch.testing.assert_close`` for these dtypes."""

_SUMS = 2
"""Standard deviations of the rounding error of a sum that two orders of adding it may be apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The largest relative error that counts as equal.

    Attributes:
        base: in the first training step.
        ceiling: it grows up to this in proportion to the number of the step: each step adds its own rounding to the weights. 0 where it does not grow.
        reason: why it is that, in words.
    """

    base: float
    ceiling: float
    reason: str

    def at(self, step: int) -> float:
        """The largest relative error that counts as equal in training step ``step``, counted from 1."""
        return max(self.base, min(self.base * step, self.ceiling))


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
    Two runs that share less than half of the coarsest dtype's digits do not agree, however many steps they have made.
    """
    sites = [site for trace in (a, b) for site in trace.sites.values() if site.kind == "output"]
    found = {site.dtype for site in sites}
    coarsest = max(
        (DTYPES[name] for name in found if name in DTYPES), key=attrgetter("epsilon"), default=DTYPES["float32"]
    )
    summed = min((coarsest, DTYPES["float32"]), key=attrgetter("epsilon"))
    terms = max(map(_terms, sites), default=1)
    depth = max(len({site.fqn for site in t.sites.values() if site.kind == "output"}) for t in (a, b))
    stored, added = EPSILONS * coarsest.epsilon, _SUMS * sqrt(terms * depth) * summed.epsilon
    if stored >= added:
        reason = f"{EPSILONS} times the epsilon of {coarsest.name}"
    else:
        reason = f"what {summed.name} rounding does to sums of up to {terms:,} terms in {depth:,} modules"
    half = sqrt(coarsest.epsilon)
    base = min(max(stored, added), max(stored, half))
    times = (
        f", times the number of the step up to {half:.2g}, half of the digits of {coarsest.name}" if base < half else ""
    )
    return Tolerance(base=base, ceiling=half, reason=f"{reason}{times}")


def _terms(site: Site) -> int:
    """The longest sum behind a module output or the gradients of its weights: over features, or over everything else."""
    known = [max(size, 1) for size in site.shape]
    return max(known[-1], prod(known[:-1])) if known else 1


class Verdict(StrEnum):
    """What two traces are to each other."""

    EQUAL = "equal"
    """Everything that either measured is in both and agrees; only outputs that the other's modules do not return are set aside."""
    DIVERGED = "diverged"
    """Something that both measured differs."""
    INCOMPLETE = "incomplete"
    """What both measured agrees, but one holds what the other lacks; or nothing is in both."""


class Difference(StrEnum):
    """In what two measurements differ."""

    NONFINITE = "nonfinite"
    """The number of NaN or of inf elements. Equal numbers are equal: NaN equals NaN."""
    SHAPE = "shape"
    MAGNITUDE = "magnitude"
    ONLY_A = "only-a"
    """B has no such call."""
    ONLY_B = "only-b"
    """A has no such call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two traces.

    Attributes:
        label: what it is called, usually its directory.
        watched: False for a run that was not watched, which measures no tensor.
        complete: whether the trace has its end record; one without was cut short.
        tensors: number of measurements.
        modules: number of modules whose outputs were measured.
        steps_completed: training steps done.
        ended: how it ended, in words.
        findings: id and summary of each finding that is more than a note.
        device: device type of the tensors, several joined by ``+``; empty without tensors.
        dtypes: dtypes of module outputs, commonest first.
        damage: what could not be read of the trace.
    """

    label: str
    watched: bool
    complete: bool
    tensors: int
    modules: int
    steps_completed: int
    ended: str
    device: str
    dtypes: tuple[str, ...]
    findings: tuple[tuple[str, str], ...] = ()
    damage: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measurement; ``absmax`` is over its finite elements."""

    dtype: str
    shape: tuple[int, ...]
    absmax: float
    num_nan: int
    num_inf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A place where two traces differ.

    Attributes:
        lane: ``forward`` ``generate`` ``recompute`` ``probe`` for outputs, ``backward`` for their gradients, ``gradient`` and
            ``parameter`` for those of parameters, ``loss``.
        path: place inside a structured output, empty for a plain tensor.
        nth: which of the step's measurements of this tensor it is, from 1.
        error: relative error of absmax; None where something else differs.
        pairs_before: how many measurements before this one are in both.
    """

    fqn: str
    cls: str
    lane: str
    path: str
    step: int
    nth: int
    difference: Difference
    a: Measured | None
    b: Measured | None
    error: float | None
    pairs_before: int


@dataclass(slots=True, kw_only=True)
class ModuleDrift:
    """How far one module (or parameter) drifts in one lane.

    Attributes:
        cls: its class; both where the runs have another one.
        compared: measurements in both; ``equal`` of them in every digit that a trace keeps, ``beyond`` outside the tolerance.
        first_beyond: number, from 0, of the first such pair among all that both traces have; None where all agree.
        only_a, only_b: calls that one trace holds alone.
        max_error: largest relative error of absmax, |a - b| / max(|a|, |b|), and the step in which it was first reached.
        dtypes_a, dtypes_b: dtypes of the tensors.
        nonfinite_a, nonfinite_b: measurements with NaN or inf.
    """

    root: int
    fqn: str
    cls: str = ""
    lane: str
    compared: int = 0
    equal: int = 0
    beyond: int = 0
    first_beyond: int | None = None
    only_a: int = 0
    only_b: int = 0
    max_error: float = 0.0
    max_error_step: int | None = None
    dtypes_a: tuple[str, ...] = ()
    dtypes_b: tuple[str, ...] = ()
    nonfinite_a: int = 0
    nonfinite_b: int = 0

    def add_pair(self, step: int, a: Sample, b: Sample, beyond: int | None) -> None:
        """Add what both runs have measured; ``beyond`` is the number of the pair if it is outside the tolerance."""
        self.compared += 1
        if beyond is not None:
            self.beyond += 1
            self.first_beyond = beyond if self.first_beyond is None else self.first_beyond
        elif a.absmax == b.absmax:
            self.equal += 1
        error = relative_error(a.absmax, b.absmax)
        if error > self.max_error:
            self.max_error, self.max_error_step = error, step

    def note(self, side: str, site: Site, sample: Sample) -> None:
        """Note class, dtype and finiteness of what one side has measured."""
        if site.cls not in self.cls.split(" → "):
            self.cls = f"{self.cls} → {site.cls}" if self.cls else site.cls
        if side == "A":
            self.dtypes_a = self.dtypes_a if site.dtype in self.dtypes_a else (*self.dtypes_a, site.dtype)
            self.nonfinite_a += not sample.finite
        else:
            self.dtypes_b = self.dtypes_b if site.dtype in self.dtypes_b else (*self.dtypes_b, site.dtype)
            self.nonfinite_b += not sample.finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Something that only one trace has measured.

    Attributes:
        only_in: ``A`` or ``B``.
        whole: True for a module of which the other trace knows nothing, False for one of its tensors or lanes.
        extra: whether it is an additional output of a module whose other outputs the other trace has in the same lane, such
            as the weights that only eager attention returns.
        tensors: measurements of it.
        after_the_end: whether all of them were taken after the last thing that both traces share.
    """

    only_in: str
    root: int
    fqn: str
    lane: str
    path: str
    whole: bool
    extra: bool
    tensors: int
    after_the_end: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricDrift:
    """One number that both runs report per step (loss, grad_norm, …).

    Attributes:
        steps: the steps in which either reports it.
        a, b: the values, None where missing or not finite; two that are not finite are equal.
        beyond: the steps in which the values differ by more than the tolerance, or only one is finite.
        lone: the steps that only one run has reported.
    """

    name: str
    steps: tuple[int, ...]
    a: tuple[float | None, ...]
    b: tuple[float | None, ...]
    max_error: float
    beyond: tuple[int, ...]
    lone: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProbDrift:
    """How far the token log-probabilities on the probe batch are apart after one step.

    Attributes:
        untrained: whether it is the probe before the first step of a model.
        tokens: how many are finite in both.
        error: ‖a - b‖ / max(‖a‖, ‖b‖) over these.
        max_difference: in nats.
        unmatched: tokens for which only one run has a finite value.
    """

    step: int
    untrained: bool
    tokens: int
    error: float
    max_difference: float
    unmatched: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Where one run has taken a trained parameter, by some of its elements.

    Attributes:
        dtype: of the parameter.
        moved: share of the elements that are not what they were before the first step.
        distance: the norm of their changes.
        norm: of their values at the end.
    """

    dtype: str
    moved: float
    distance: float
    norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterDrift:
    """How far apart two runs of equally many steps have taken a parameter.

    Attributes:
        stands_still: ``A`` or ``B`` where most of the elements that the other run moves have stayed in that one; else empty.
        beyond: whether that is so, or the distances differ by more than the tolerance and what rounding adds to them.
    """

    fqn: str
    steps: int
    a: End
    b: End
    stands_still: str
    beyond: bool


def parameter_drift(fqn: str, steps: int, a: End, b: End, tolerance: float) -> ParameterDrift:
    """Compares two ends of a parameter after ``steps`` steps."""
    slow, fast = sorted((a, b), key=lambda end: end.moved)
    near, far = sorted((a.distance, b.distance))
    # values that are rounded at random in each step move further than exact ones, and fewer of them move: they do not stand still
    still = slow.moved < fast.moved / 2 and slow.distance < (1 - tolerance) * fast.distance
    spacing = max(DTYPES[end.dtype].epsilon for end in (a, b))
    rounding = sqrt(steps) * spacing / 2 * max(a.norm, b.norm) if tolerance else 0.0
    return ParameterDrift(
        fqn=fqn,
        steps=steps,
        a=a,
        b=b,
        stands_still=("A" if slow is a else "B") if still else "",
        beyond=still or far - near > tolerance * far + rounding,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Something that is not the same for both runs; None where one has no such thing."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceComparison:
    """Two traces, compared.

    Attributes:
        tolerance: largest relative error that counts as equal in the first training step.
        tolerance_ceiling: it is that times the number of the step, up to this.
        tolerance_reason: why it is that, where nobody gave it.
        compared: measurements in both; ``equal`` of them in every digit that a trace keeps, ``beyond`` outside the tolerance.
        lone_a, lone_b: measurements that one trace holds alone.
        ends_differ: whether one completed and the other did not, or they raised differently.
        parameters: those that both runs have trained with equally many steps.
        parameters_equal: whether the trained parameters are bitwise equal at the end; None where a trace does not say.
        first: where they first differ, in execution order.
        first_nonfinite: where the first NaN or inf is that the other does not have.
        modules: in the order of execution, those of which only one trace has anything at the end.
        environment, settings: what differs in the environments, and in what the runs were asked to do.
    """

    verdict: Verdict
    a: Side
    b: Side
    tolerance: float
    tolerance_ceiling: float
    tolerance_reason: str
    compared: int
    equal: int
    beyond: int
    lone_a: int
    lone_b: int
    ends_differ: bool
    parameters_equal: bool | None
    parameters: tuple[ParameterDrift, ...]
    first: Divergence | None
    first_nonfinite: Divergence | None
    modules: tuple[ModuleDrift, ...]
    missing: tuple[Missing, ...]
    metrics: tuple[MetricDrift, ...]
    logprobs: tuple[LogProbDrift, ...]
    environment: tuple[Setting, ...]
    settings: tuple[Setting, ...]

    def tolerance_at(self, step: int) -> float:
        """Largest relative error that counts as equal in training step ``step``."""
        return Tolerance(base=self.tolerance, ceiling=self.tolerance_ceiling, reason=self.tolerance_reason).at(step)

    def surplus(self, side: str) -> int:
        """Measurements that ``side`` (``A`` or ``B``) holds alone although the other has measured the same tensor."""
        lone = self.lone_a if side == "A" else self.lone_b
        return lone - sum(one.tensors for one in self.missing if one.only_in == side)
