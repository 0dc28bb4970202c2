"""Compares two runs, whatever made them different: dtype, device, library versions, attention implementation."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dtypedoctor.analysis import How, ending_of
from dtypedoctor.runner.run import SavedRun
from dtypedoctor.trace.events import Resources
from dtypedoctor.trace.model import Trace
from dtypedoctor.trials.alignment import ALIGNED, align, missing
from dtypedoctor.trials.comparison import Setting, Side, Tolerance, TraceComparison, Verdict, default_tolerance
from dtypedoctor.trials.drift import compare_logprobs, compare_metrics, drifts


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


_ABOUT = frozenset({"name", "summary", "references", "expect", "remedies", "reference", "time_limit", "watch_every"})
"""What a scenario says about itself and its treatment; none of it changes the run."""


def describe(saved: SavedRun) -> Side:
    """One side of a comparison."""
    trace = saved.run.trace
    sites = {number: site for number, site in trace.sites.items() if site.kind in ALIGNED}
    outputs = [site for site in sites.values() if site.kind == "output"]
    return Side(
        label=saved.label,
        watched=trace.header is not None and trace.header.watched,
        complete=trace.end is not None,
        tensors=sum(sample.site in sites for sample in trace.samples),
        modules=len({(site.root, site.fqn) for site in outputs}),
        steps_completed=trace.steps_done,
        ended=ending_of(saved.run).words,
        device="+".join(sorted({site.device for site in sites.values()})),
        dtypes=_commonest_first(site.dtype for site in outputs),
        damage=_damage(trace),
    )


def _commonest_first(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name, _ in Counter(names).most_common())


def _damage(trace: Trace) -> tuple[str, ...]:
    """What a trace lacks; of a long run the steps that were folded into totals."""
    return trace.damage if trace.folded is None else (*trace.damage, trace.folded.describe())


def end_of(saved: SavedRun) -> tuple[str, ...]:
    """How a run ended, in terms that are the same for two runs that ended alike."""
    run, ending = saved.run, ending_of(saved.run)
    if ending.how is How.DIED:
        return "died", str(run.exit.code), str(run.exit.timed_out)
    if ending.raised is not None:
        return "raised", ending.raised.type, str(ending.raised.step)
    return "completed", str(run.exit.code) if run.foreign else "0"


def settings_of(saved: SavedRun) -> dict[str, Any]:
    """What the worker was asked to do, as far as it can change the run."""
    scenario = saved.request.get("scenario")
    values = scenario if isinstance(scenario, Mapping) else {}
    return {str(name): value for name, value in values.items() if name not in _ABOUT}


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Setting, ...]:
    """The entries of two nested mappings that are not the same, under dotted names, in the order of ``a``."""
    ours, theirs = dict(_flat("", a)), dict(_flat("", b))
    return tuple(
        Setting(name=name, a=ours.get(name), b=theirs.get(name))
        for name in ours | theirs
        if ours.get(name) != theirs.get(name)
    )


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), item)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value):
        for index, item in enumerate(value):
            yield from _flat(f"{prefix}.{index}", item)
    elif isinstance(value, (list, tuple)):
        yield prefix, ", ".join(map(str, value))
    elif value is not None:
        yield prefix, str(value)
