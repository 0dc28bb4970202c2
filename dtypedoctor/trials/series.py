"""Compares what two runs report per step: losses, norms, and log-probabilities on the probe batch."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import hypot
from typing import TypeVar

from dtypedoctor.trace.events import Metric, ProbeLogProbs
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.comparison import LogProbDrift, MetricDrift
from dtypedoctor.trials.tolerance import Tolerance, drift

__all__ = ["compare_logprobs", "compare_metrics"]

_NOT_COMPARED = frozenset({"step_time"})
"""Measurements of the machine, not of the training."""

_Record = TypeVar("_Record", Metric, ProbeLogProbs)
_Key = tuple[int, int]
"""Step, and which of the step's records it is."""


def compare_metrics(a: Trace, b: Trace, tolerance: Tolerance) -> tuple[MetricDrift, ...]:
    """One value for each number that either run reports, in the order in which they are first reported."""
    ours, theirs = _by_key(a.all(Metric)), _by_key(b.all(Metric))
    names = dict.fromkeys(
        name for record in (*ours.values(), *theirs.values()) for name in (*record.values, *record.nonfinite)
    )
    return tuple(_metric(name, ours, theirs, tolerance) for name in names if name not in _NOT_COMPARED)


def _metric(name: str, ours: Mapping[_Key, Metric], theirs: Mapping[_Key, Metric], tolerance: Tolerance) -> MetricDrift:
    keys = sorted({key for side in (ours, theirs) for key, record in side.items() if _reports(record, name)})
    a, b = ([_value(side.get(key), name) for key in keys] for side in (ours, theirs))
    alone = [key for key in keys if not (_reports(ours.get(key), name) and _reports(theirs.get(key), name))]
    errors = {
        key: _error(mine, yours, tolerance.at(key[0]))
        for key, mine, yours in zip(keys, a, b, strict=True)
        if key not in alone
    }
    return MetricDrift(
        name=name,
        steps=tuple(step for step, _ in keys),
        a=tuple(a),
        b=tuple(b),
        max_error=max(errors.values(), default=0.0),
        beyond=tuple(key[0] for key, error in errors.items() if error > tolerance.at(key[0])),
        lone=tuple(step for step, _ in alone),
    )


def _error(a: float | None, b: float | None, tolerance: float) -> float:
    """Relative error; 1 where only one is finite, 0 where neither is or both are too close to tell."""
    if a is None or b is None:
        return 0.0 if a is b else 1.0
    return drift(a, b, tolerance)


def _reports(record: Metric | None, name: str) -> bool:
    return record is not None and (name in record.values or name in record.nonfinite)


def _value(record: Metric | None, name: str) -> float | None:
    return record.values.get(name) if record is not None else None


def _by_key(records: Iterable[_Record]) -> dict[_Key, _Record]:
    seen: Counter[int] = Counter()
    found = {}
    for record in records:
        seen[record.step] += 1
        found[record.step, seen[record.step]] = record
    return found


def compare_logprobs(a: Trace, b: Trace) -> tuple[LogProbDrift, ...]:
    """One value for each probe that both runs hold, in order."""
    ours, theirs = _by_key(a.all(ProbeLogProbs)), _by_key(b.all(ProbeLogProbs))
    return tuple(_logprobs(record, theirs[key]) for key, record in ours.items() if key in theirs)


def _logprobs(ours: ProbeLogProbs, theirs: ProbeLogProbs) -> LogProbDrift:
    a, b = ours.values, theirs.values
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x is not None and y is not None]
    unmatched = sum((x is None) != (y is None) for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
    return LogProbDrift(
        step=ours.step,
        untrained=ours.untrained,
        tokens=len(pairs),
        error=_norm_error(pairs),
        max_difference=max((abs(x - y) for x, y in pairs), default=0.0),
        unmatched=unmatched,
    )


def _norm_error(pairs: Sequence[tuple[float, float]]) -> float:
    largest = max(hypot(*(x for x, _ in pairs)), hypot(*(y for _, y in pairs)))
    return hypot(*(x - y for x, y in pairs)) / largest if largest else 0.0
