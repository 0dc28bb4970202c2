"""Compares two runs, whatever made them different: dtype, device, library versions, attention implementation."""

from collections import Counter
from dataclasses import replace

from dtypedoctor.runner.run import SavedRun
from dtypedoctor.trace.events import Resources
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.alignment import align
from dtypedoctor.trials.comparison import TraceComparison, Verdict
from dtypedoctor.trials.drift import drifts
from dtypedoctor.trials.missing import missing
from dtypedoctor.trials.series import compare_logprobs, compare_metrics
from dtypedoctor.trials.sides import describe, differing, end_of, settings_of
from dtypedoctor.trials.tolerance import Tolerance, default_tolerance

__all__ = ["compare_runs"]


def compare_runs(a: SavedRun, b: SavedRun, tolerance: float | None = None) -> TraceComparison:
    """Compares two runs of the same model.

    Args:
        a: one run.
        b: the other.
        tolerance: largest relative error that counts as equal; 0 for equal to the last digit that traces keep. Left out, it
            follows from what rounding does (:func:`.default_tolerance`).
    """
    ours, theirs = a.run.trace, b.run.trace
    limit = default_tolerance(ours, theirs)
    if tolerance is not None:
        limit = Tolerance(base=tolerance, grows=False, reason="as given")
    alignment = align(ours, theirs)
    found = drifts(ours, theirs, alignment, limit)
    lone = Counter(one.side for one in alignment.lone)
    comparison = TraceComparison(
        verdict=Verdict.EQUAL,
        a=describe(a),
        b=describe(b),
        tolerance=limit.base,
        tolerance_grows=limit.grows,
        tolerance_reason=limit.reason,
        compared=found.compared,
        equal=found.equal,
        beyond=found.beyond,
        lone_a=lone["A"],
        lone_b=lone["B"],
        ends_differ=end_of(a) != end_of(b),
        parameters_equal=_parameters_equal(ours, theirs),
        first=found.first,
        first_nonfinite=found.first_nonfinite,
        modules=found.modules,
        missing=missing(alignment),
        metrics=compare_metrics(ours, theirs, limit),
        logprobs=compare_logprobs(ours, theirs),
        environment=differing(ours.environment, theirs.environment),
        settings=differing(settings_of(a), settings_of(b)),
    )
    return replace(comparison, verdict=_verdict(comparison))


def _verdict(found: TraceComparison) -> Verdict:
    if _diverged(found):
        return Verdict.DIVERGED
    nothing = not found.compared and not any(len(metric.steps) > len(metric.lone) for metric in found.metrics)
    lacking = (
        any(not one.extra for one in found.missing),
        found.surplus("A"),
        found.surplus("B"),
        found.a.damage,
        found.b.damage,
        not found.a.complete,
        not found.b.complete,
        any(metric.lone for metric in found.metrics),
    )
    return Verdict.INCOMPLETE if nothing or any(lacking) else Verdict.EQUAL


def _diverged(found: TraceComparison) -> bool:
    return (
        found.first is not None
        or found.ends_differ
        or any(metric.beyond for metric in found.metrics)
        or any(probe.error > found.tolerance_at(probe.step) or probe.unmatched for probe in found.logprobs)
        or (found.tolerance == 0 and found.parameters_equal is False)
    )


def _parameters_equal(a: Trace, b: Trace) -> bool | None:
    """Whether the checksums over the trained parameters are the same; None where one is not there."""
    ours, theirs = a.last(Resources), b.last(Resources)
    if ours is None or theirs is None or ours.checksum is None or theirs.checksum is None:
        return None
    return ours.checksum == theirs.checksum
