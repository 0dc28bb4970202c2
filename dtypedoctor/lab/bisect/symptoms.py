"""What went wrong in one run, boiled down to what a bisection compares.

Accuracy is judged by the float32 reference itself: how much its outputs change when each weight, and each gradient that comes
back, moves by one unit in the last place of the dtype under suspicion. A run in that dtype rounds them, and intermediates, by
half of that at most.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import fsum, sqrt
from typing import NamedTuple

from dtypedoctor.analysis import analysis_of
from dtypedoctor.diagnosis.incidents import Incident
from dtypedoctor.diagnosis.wording import is_dtype_error, short
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.lab.bisect.results import OWN, Kind, Symptom
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.events import Correction, Metric, ProbeLogProbs, Raised, Sample, Site
from dtypedoctor.trace.model import Trace

FACTOR = 4.0
"""Multiple of the sensitivity that is accepted. Healthy float16 and bfloat16 runs of the builtin models are at 0.2 to 0.6
times the sensitivity; weights that were read in another format than they were written in are at 30 times and more."""

LOG_PROBABILITIES, LOSS = "log-probabilities", "loss"

Reading = tuple[str, int, int]
"""What is read, after which step, and which one of several after that step: ``("log-probabilities", 0, 0)`` is before the first model is trained."""


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
                name, step, *_ = reading
                return Excess(
                    step=max(step, 1), words=f"{name} after step {step} differ by {gap:.3g}, {limit:.3g} accepted"
                )
        return None

    def of_first_outputs(self) -> "Tolerance":
        """The part about outputs before any training, which is the same for all workloads of one model."""
        limits = {reading: limit for reading, limit in self.limits.items() if reading[:2] == (LOG_PROBABILITIES, 0)}
        return replace(self, limits=limits)


def derive(reference: Run, perturbed: Iterable[Run], *, sampled: bool, given: float | None = None) -> Tolerance:
    """The tolerance for runs of one workload.

    Args:
        reference: its run in float32.
        perturbed: the same with weights and gradients moved by one unit in the last place.
        sampled: the workload draws tokens, so that after the first step runs differ by luck; only outputs before it count.
        given: a limit that is taken for every reading instead of the derived ones.
    """
    exact = {r: v for r, v in _readings(reference.trace).items() if not (sampled and (r[0] == LOSS or r[1] > 0))}
    moved = [_readings(run.trace) for run in perturbed]
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


def part_in_words(name: str) -> str:
    """A candidate as a person would say it: a module whole, or only its own arithmetic."""
    module = short(name.removesuffix(OWN))
    return f"{module}'s own operators" if name.endswith(OWN) else module


def symptom_of(run: Run, tolerance: Tolerance | None = None) -> Symptom:
    """What ``run`` came to.

    Args:
        run: a watched run.
        tolerance: how far its outputs may be from the reference's; None judges by finiteness and exceptions alone.
    """
    trace = run.trace
    incident = next(iter(analysis_of(trace).incidents), None)
    found = next(iter(_symptoms(run, tolerance)), None)
    last = incident.sample if incident is not None and found is not None else None
    # The module that came nearest to the end of its dtype's range.
    reached = list(_reached(trace, last))
    narrow = [peak for bits, peak in reached if bits <= 16]
    peak = max(narrow or [peak for _, peak in reached], key=lambda peak: peak.share, default=None)
    if found is None:
        found = Symptom(kind=Kind.HEALTHY, reason="healthy", fqn=peak.fqn if peak else None)
    if peak is not None:
        found = replace(found, absmax=peak.absmax, share=peak.share)
    return replace(found, seconds=run.exit.seconds)


def refused(message: str) -> Symptom:
    """The symptom of a run that could not be done at all."""
    return Symptom(kind=Kind.REFUSED, reason=message.splitlines()[0] if message else "refused")


def _symptoms(run: Run, tolerance: Tolerance | None) -> Iterator[Symptom]:
    """What speaks against calling the run of one process healthy, the earliest cause first."""
    trace = run.trace
    incident = next(iter(analysis_of(trace).incidents), None)
    missing = next((c for c in trace.all(Correction) if not c.installed), None)
    if missing is not None:
        yield Symptom(kind=Kind.NOT_INSTALLED, reason=f"{missing.id}: {missing.reason}", detail=missing.id)
    if incident is not None:
        yield _not_finite(trace, incident)
    raised = analysis_of(trace).raised
    if raised is not None:
        yield _raised(raised)
    if run.died:
        yield _died(run)
    if trace.stopped is not None:
        yield Symptom(
            kind=Kind.DIED, reason=f"only a part of it was recorded: {os.strerror(trace.stopped.errno)}", detail="disk"
        )
    # numbers outside of the modules: what the workload reports, and the outputs on the probe batch
    for metric in analysis_of(trace).nonfinite_metrics:
        reason = f"{', '.join(metric.nonfinite)} not finite in step {metric.step}"
        yield Symptom(kind=Kind.NOT_FINITE, reason=reason, step=metric.step)
    for probe in trace.all(ProbeLogProbs):
        if None in probe.values:
            reason = f"outputs on the probe batch not finite after step {probe.step}"
            yield Symptom(kind=Kind.NOT_FINITE, reason=reason, step=probe.step)
    excess = tolerance.excess(trace) if tolerance is not None else None
    if excess is not None:
        yield Symptom(kind=Kind.INACCURATE, reason=excess.words, step=excess.step, phase="forward", call=1)


def _died(run: Run) -> Symptom:
    site = run.trace.cursor.site if run.trace.cursor is not None else None
    return Symptom(
        kind=Kind.DIED,
        reason=run.last_words(),
        detail="time limit" if run.exit.timed_out else str(run.exit.code),
        phase=site.phase if site else None,
        fqn=site.fqn if site else None,
    )


def _raised(raised: Raised) -> Symptom:
    message = raised.message.splitlines()[0] if raised.message else ""
    return Symptom(
        kind=Kind.DTYPE_ERROR if is_dtype_error(raised) else Kind.RAISED,
        reason=f"{raised.type} in step {raised.step} ({raised.phase}): {message[:160]}",
        detail=raised.type,
        phase=raised.phase,
        step=raised.step,
        call=raised.call,
        fqn=raised.modules[-1] if raised.modules else None,
    )


def _not_finite(trace: Trace, incident: Incident) -> Symptom:
    sample, site = incident.sample, incident.site
    fqn = _origin(trace, sample, site) if sample is not None and site is not None else None
    where = part_in_words(fqn) if fqn is not None else "the code outside of any module"
    return Symptom(
        kind=Kind.NOT_FINITE,
        reason=f"inf or NaN, first in {where}, step {incident.step} ({incident.phase})",
        phase=incident.phase,
        step=incident.step,
        call=incident.call,
        fqn=fqn,
    )


def _origin(trace: Trace, sample: Sample, site: Site) -> str:
    """The module that made what is not finite: the measured one, or whoever fed it with what was so already.

    A module whose input was not finite is asked no further; its caller computed that input, unless it got it, too.
    """
    if site.kind != "output":
        return site.fqn
    spoilt = {
        other.fqn
        for s in trace.samples
        if s.n >= sample.n and s.call == sample.call and not s.finite and (other := trace.sites[s.site]).kind == "input"
    }
    fqn = site.fqn
    if fqn not in spoilt:
        has_parts = any(
            other.fqn.startswith(f"{fqn}." if fqn else "") and other.fqn != fqn for other in trace.sites.values()
        )
        return fqn + OWN if has_parts else fqn
    while fqn in spoilt and fqn:
        fqn = fqn.rpartition(".")[0]
    return fqn + OWN


class _Peak(NamedTuple):
    share: float
    absmax: float
    fqn: str


def _reached(trace: Trace, until: Sample | None) -> Iterator[tuple[int, _Peak]]:
    """What each measured tensor reached, with the bits of its dtype."""
    for sample in trace.samples:
        if until is not None and sample.n > until.n and sample.call > until.call:
            break
        site = trace.sites.get(sample.site)
        if site is not None and site.kind in ("output", "input", "grad_output") and site.dtype in DTYPES:
            dtype = DTYPES[site.dtype]
            yield dtype.bits, _Peak(sample.absmax / dtype.max, sample.absmax, site.fqn)
