"""How far a run's outputs may be from those of the float32 reference.

The yardstick is the reference itself: how much its outputs change when each weight, and each gradient that comes back, moves
by one unit in the last place of the dtype under suspicion. A run in that dtype rounds them, and intermediates, by half of
that at most.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import fsum, sqrt

from dtypedoctor.trace.events import Metric, ProbeLogProbs
from dtypedoctor.trace.reader import Trace

__all__ = ["FACTOR", "Excess", "Reading", "Tolerance", "derive"]

FACTOR = 4.0
"""Multiple of the sensitivity that is accepted. Healthy float16 and bfloat16 runs of the builtin models are at 0.2 to 0.6
times the sensitivity; weights that were read in another format than they were written in are at 30 times and more."""

LOG_PROBABILITIES, LOSS = "log-probabilities", "loss"

Reading = tuple[str, int, int]
"""What is read, after which step, and which one of several after that step: ``("log-probabilities", 0, 0)`` is before the first
model is trained, ``("loss", 1, 0)`` that of step 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A reading that is too far from the reference."""

    step: int
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """What is accepted of a run.

    Attributes:
        reference: the reference's values.
        limits: the largest root-mean-square difference from them, by reading; readings without a limit are not compared.
        given: the person's own limit, where there is one.
    """

    reference: Mapping[Reading, tuple[float, ...]]
    limits: Mapping[Reading, float]
    given: float | None = None

    def excess(self, trace: Trace) -> Excess | None:
        """The first reading of ``trace`` that is too far from the reference; None where all are near enough."""
        for reading, values in _readings(trace).items():
            limit = self.limits.get(reading)
            if limit is None:
                continue
            gap = _distance(values, self.reference[reading])
            if gap is not None and gap > limit:
                name, step, _ = reading
                return Excess(
                    step=max(step, 1), words=f"{name} after step {step} differ by {gap:.3g}, {limit:.3g} accepted"
                )
        return None

    def of_first_outputs(self) -> "Tolerance":
        """The part about outputs before any training, which is the same for all workloads of one model."""
        limits = {reading: limit for reading, limit in self.limits.items() if reading[:2] == (LOG_PROBABILITIES, 0)}
        return replace(self, limits=limits)


def derive(reference: Trace, perturbed: Iterable[Trace], *, sampled: bool, given: float | None = None) -> Tolerance:
    """The tolerance for runs of one workload.

    Args:
        reference: its trace in float32.
        perturbed: the same with weights and gradients moved by one unit in the last place.
        sampled: the workload draws tokens, so that after the first step runs differ by luck; only outputs before it count.
        given: a limit that is taken for every reading instead of the derived ones.
    """
    exact = {r: v for r, v in _readings(reference).items() if not (sampled and (r[0] == LOSS or r[1] > 0))}
    moved = [_readings(trace) for trace in perturbed]
    limits: dict[Reading, float] = {}
    for reading in exact:
        limit = given if given is not None else _limit(reading, exact, moved)
        if limit is not None:
            limits[reading] = limit
    return Tolerance(
        reference={r: tuple(v) for r, v in exact.items()},
        limits=limits,
        given=given,
    )


def _limit(
    reading: Reading, exact: Mapping[Reading, list[float]], moved: list[dict[Reading, list[float]]]
) -> float | None:
    """A loss is a mean over tokens, so it may be as far away as the tokens' log-probabilities at the same time."""
    name, step, turn = reading
    kin = {reading}
    if name == LOSS:
        kin |= {(LOG_PROBABILITIES, step - 1, turn), (LOG_PROBABILITIES, step, turn)}
    gaps = [
        gap
        for one in kin & exact.keys()
        for values in moved
        if one in values and (gap := _distance(values[one], exact[one])) is not None
    ]
    return FACTOR * max(gaps) if gaps else None


def _readings(trace: Trace) -> dict[Reading, list[float]]:
    """Everything comparable of a trace that is finite, in the order of the steps."""
    found: dict[Reading, list[float]] = {}
    turns: Counter[tuple[str, int]] = Counter()
    for name, step, values in _numbers(trace):
        turn = turns[name, step]
        turns[name, step] += 1
        finite = [value for value in values if value is not None]
        if finite and len(finite) == len(values):
            found[name, step, turn] = finite
    return dict(sorted(found.items(), key=lambda item: item[0][1]))


def _numbers(trace: Trace) -> Iterator[tuple[str, int, list[float | None]]]:
    for probe in trace.all(ProbeLogProbs):
        yield LOG_PROBABILITIES, probe.step, probe.values
    for metric in trace.all(Metric):
        yield LOSS, metric.step, [metric.values.get("loss")]


def _distance(values: Iterable[float], exact: Iterable[float]) -> float | None:
    """Root mean square of the differences; None where there is nothing to compare."""
    squares = [(a - b) ** 2 for a, b in zip(values, exact, strict=False)]
    return sqrt(fsum(squares) / len(squares)) if squares else None
