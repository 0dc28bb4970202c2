"""Compares two runs, whatever made them different: dtype, device, library versions, attention implementation.

Their measurements are paired; each module, each number per step and each trained parameter is compared; the verdict follows from all of that.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot
from typing import Any, NamedTuple, TypeVar

from dtypedoctor.analysis import How, analysis_of, ending_of
from dtypedoctor.diagnosis.wording import named_in
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.lab.compare.comparison import (
    Difference,
    Divergence,
    End,
    LogProbDrift,
    Measured,
    MetricDrift,
    Missing,
    ModuleDrift,
    ParameterDrift,
    Setting,
    Side,
    Tolerance,
    TraceComparison,
    Verdict,
    default_tolerance,
    drift,
    parameter_drift,
    relative_error,
)
from dtypedoctor.lab.trials.judge import parameters_equal
from dtypedoctor.runner.run import SavedRun
from dtypedoctor.trace.events import Metric, ProbeLogProbs, Sample
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import ParameterEnds

ALIGNED = frozenset({"output", "loss", "grad_output", "grad", "param"})
"""Kinds of sites that are compared. Inputs are measured only where an output is not finite, so they say nothing more."""

_LANES = {"grad_output": "backward", "grad": "gradient", "param": "parameter", "loss": "loss"}


class Stream(NamedTuple):
    """Everything that was measured at one place over a whole run: one tensor of one module in one phase."""

    root: int
    fqn: str
    kind: str
    path: str
    phase: str

    @property
    def lane(self) -> str:
        """The part of a run that it belongs to: ``loss``, ``backward``, ``gradient``, ``parameter``, or its phase."""
        return _LANES.get(self.kind, self.phase)

    @property
    def owner(self) -> tuple[int, str]:
        """The module that holds the parameter whose gradient it is; no module for anything else."""
        return (self.root, self.fqn.rpartition(".")[0]) if self.kind == "grad" else (-1, "")


@dataclass(frozen=True, slots=True)
class Measurement:
    """A measurement that both runs hold, or one of them.

    Attributes:
        stream, step, nth: it is the ``nth`` of the stream, from 1, in that training step.
        a, b: what each run measured; None where it has no such call.
        before: the number, from 0, of this pair; of what one run holds alone, that of the pair before which it was taken.
    """

    stream: Stream
    step: int
    nth: int
    a: Sample | None
    b: Sample | None
    before: int

    @property
    def side(self) -> str:
        """Which run holds it alone."""
        return "A" if self.b is None else "B"


def align(a: Trace, b: Trace) -> tuple[list[Measurement], list[Measurement]]:
    """Pairs the measurements of two traces by module, tensor, phase, training step and order of calls.

    Modules have to have the same dotted names below outermost modules that were seen in the same order.

    Returns:
        What both hold, in the order in which A measured it; what only one holds, A's first, each in its own order.
    """
    theirs = dict(_placed(b))
    pairs: dict[tuple[Stream, int, int], Measurement] = {}
    only_a, only_b = [], []
    for place, sample in _placed(a):
        measurement = Measurement(*place, sample, theirs.get(place), len(pairs))
        if measurement.b is None:
            only_a.append(measurement)
        else:
            pairs[place] = measurement
    # What only B holds stands before the pair that follows it in B
    following = len(pairs)
    for place, sample in reversed(theirs.items()):
        if place in pairs:
            following = pairs[place].before
        else:
            only_b.append(Measurement(*place, None, sample, following))
    return list(pairs.values()), [*only_a, *reversed(only_b)]


def _placed(trace: Trace) -> Iterator[tuple[tuple[Stream, int, int], Sample]]:
    streams = {
        number: Stream(site.root, site.fqn, site.kind, site.index, site.phase)
        for number, site in trace.sites.items()
        if site.kind in ALIGNED
    }
    seen: Counter[tuple[Stream, int]] = Counter()
    for sample in trace.samples:
        stream = streams.get(sample.site)
        if stream is not None:
            seen[stream, sample.step] += 1
            yield (stream, sample.step, seen[stream, sample.step]), sample


def missing(pairs: Sequence[Measurement], lone: Sequence[Measurement]) -> tuple[Missing, ...]:
    """Everything of which the other run has nothing at all, A's first, each in execution order.

    Single calls that one run makes more often are not among them: they are counted in the drift of their module.
    """
    shared, end = {pair.stream for pair in pairs}, len(pairs)
    lanes = {(stream.root, stream.fqn, stream.lane) for stream in shared}
    in_both = {(stream.root, stream.fqn) for stream in shared}
    known = {side: in_both | {m.stream[:2] for m in lone if m.side == side} for side in "AB"}
    groups: dict[tuple[str, int, str, str, str], list[Measurement]] = {}
    for measurement in lone:
        stream, side = measurement.stream, measurement.side
        if stream not in shared:
            whole = stream[:2] not in known["B" if side == "A" else "A"]
            tensor = ("", "") if whole else (stream.lane, stream.path)
            groups.setdefault((side, stream.root, stream.fqn, *tensor), []).append(measurement)
    return tuple(
        Missing(
            only_in=side,
            root=root,
            fqn=fqn,
            lane=lane,
            path=path,
            whole=not lane,
            extra=(root, fqn, lane) in lanes,
            tensors=len(several),
            after_the_end=end > 0 and all(measurement.before == end for measurement in several),
        )
        for (side, root, fqn, lane, path), several in groups.items()
    )


def surplus_call(pairs: Sequence[Measurement], lone: Sequence[Measurement]) -> Measurement | None:
    """The first call of a stream that both runs have, which only one of them makes.

    Where only one run goes on after the last thing in common, it is merely longer: that is no divergence.
    """
    shared, end = {pair.stream for pair in pairs}, len(pairs)
    calls = [measurement for measurement in lone if measurement.stream in shared]
    if len({call.side for call in calls if call.before == end}) < 2:
        calls = [call for call in calls if call.before < end]
    return min(calls, key=lambda call: call.before, default=None)


def divergence(a: Trace, b: Trace, measurement: Measurement, difference: Difference) -> Divergence:
    """What is to be said about a measurement that differs, or that one run has more."""
    ours, theirs = _measured(a, measurement.a), _measured(b, measurement.b)
    trace, sample = (a, measurement.a) if measurement.a is not None else (b, measurement.b)
    assert sample is not None  # one of the two runs holds it
    return Divergence(
        fqn=measurement.stream.fqn,
        cls=trace.sites[sample.site].cls,
        lane=measurement.stream.lane,
        path=measurement.stream.path,
        step=measurement.step,
        nth=measurement.nth,
        difference=difference,
        a=ours,
        b=theirs,
        error=relative_error(ours.absmax, theirs.absmax)
        if difference is Difference.MAGNITUDE and ours and theirs
        else None,
        pairs_before=measurement.before,
    )


def _measured(trace: Trace, sample: Sample | None) -> Measured | None:
    if sample is None:
        return None
    site = trace.sites[sample.site]
    return Measured(
        dtype=site.dtype,
        shape=tuple(site.shape),
        absmax=sample.absmax,
        num_nan=sample.num_nan,
        num_inf=sample.num_inf,
    )


def differences(
    a: Trace, b: Trace, pairs: Iterable[Measurement], tolerance: Tolerance
) -> Iterator[tuple[Measurement, Difference | None]]:
    """Yields each pair with the way in which it differs."""
    pairs = list(pairs)
    # A gradient that is zero in exact arithmetic, as of the bias of an attention's keys, is all rounding: the sums that cancel in it are as
    # large as the other gradients of the module in that step, and so is the measure of what rounding may do.
    around: dict[tuple[tuple[int, str], int], float] = {}
    for pair in pairs:
        if pair.stream.kind == "grad" and pair.a is not None and pair.b is not None:
            key = pair.stream.owner, pair.step
            around[key] = max(around.get(key, 0.0), pair.a.absmax, pair.b.absmax)
    for pair in pairs:
        ours, theirs, limit = pair.a, pair.b, tolerance.at(pair.step)
        assert ours is not None  # it is a pair
        assert theirs is not None
        if not _may_be_equal(a.sites[ours.site].shape, b.sites[theirs.site].shape):
            yield pair, Difference.SHAPE
        elif (ours.num_nan, ours.num_inf) != (theirs.num_nan, theirs.num_inf):
            yield pair, Difference.NONFINITE
        elif abs(ours.absmax - theirs.absmax) <= limit * around.get((pair.stream.owner, pair.step), 0.0):
            yield pair, None
        else:
            is_loss, values = pair.stream.kind == "loss", (ours.absmax, theirs.absmax)
            error = drift(*values, limit) if is_loss else relative_error(*values)
            yield pair, Difference.MAGNITUDE if error > limit else None


def _may_be_equal(one: list[int], other: list[int]) -> bool:
    """Whether two shapes may be the same; -1 stands for any size."""
    return len(one) == len(other) and all(x == y or -1 in (x, y) for x, y in zip(one, other, strict=True))


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
    a, b = (
        {key: record.values.get(name) for key, record in records.items() if name in {*record.values, *record.nonfinite}}
        for records in (ours, theirs)
    )
    errors = {}
    for key in sorted(a.keys() & b.keys()):
        x, y = a[key], b[key]  # None where a value is not finite; two such values are equal
        if x is None or y is None:
            errors[key] = 0.0 if x is y else 1.0
        else:
            errors[key] = drift(x, y, tolerance.at(key[0]))
    keys = sorted(a.keys() | b.keys())
    return MetricDrift(
        name=name,
        steps=tuple(step for step, _ in keys),
        a=tuple(map(a.get, keys)),
        b=tuple(map(b.get, keys)),
        max_error=max(errors.values(), default=0.0),
        beyond=tuple(step for (step, _), error in errors.items() if error > tolerance.at(step)),
        lone=tuple(step for step, _ in sorted(a.keys() ^ b.keys())),
    )


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
    return tuple(_logprobs(record, theirs[key].values) for key, record in ours.items() if key in theirs)


def _logprobs(probe: ProbeLogProbs, b: Sequence[float | None]) -> LogProbDrift:
    a = probe.values
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x is not None and y is not None]
    unmatched = sum((x is None) != (y is None) for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))
    largest = max(hypot(*(x for x, _ in pairs)), hypot(*(y for _, y in pairs)))
    return LogProbDrift(
        step=probe.step,
        untrained=probe.untrained,
        tokens=len(pairs),
        error=hypot(*(x - y for x, y in pairs)) / largest if largest else 0.0,
        max_difference=max((abs(x - y) for x, y in pairs), default=0.0),
        unmatched=unmatched,
    )


_Found = tuple[Measurement, Difference]


def _drifts(
    ours: Trace, theirs: Trace, pairs: Sequence[Measurement], lone: Sequence[Measurement], limit: Tolerance
) -> tuple[dict[tuple[int, str, str], ModuleDrift], _Found | None, _Found | None]:
    """The drift of each module in each lane, the first pair that differs, and the first of which one side is finite and the other is not."""
    modules: dict[tuple[int, str, str], ModuleDrift] = {}

    def row(stream: Stream) -> ModuleDrift:
        empty = ModuleDrift(root=stream.root, fqn=stream.fqn, lane=stream.lane)
        return modules.setdefault((stream.root, stream.fqn, stream.lane), empty)

    first: _Found | None = None
    first_nonfinite: _Found | None = None
    for pair, difference in differences(ours, theirs, pairs, limit):
        assert pair.a is not None  # it is a pair
        assert pair.b is not None
        row(pair.stream).add_pair(pair.step, pair.a, pair.b, pair.before if difference is not None else None)
        if difference is not None:
            first = first or (pair, difference)
            if pair.a.finite != pair.b.finite:
                first_nonfinite = first_nonfinite or (pair, difference)
    for measurement in (*pairs, *lone):
        module = row(measurement.stream)
        module.only_a += measurement.b is None
        module.only_b += measurement.a is None
        for side, trace, sample in (("A", ours, measurement.a), ("B", theirs, measurement.b)):
            if sample is not None:
                module.note(side, trace.sites[sample.site], sample)
    return modules, first, first_nonfinite


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
        limit = Tolerance(base=tolerance, ceiling=0.0, reason="as given")
    pairs, lone = align(ours, theirs)
    modules, first, first_nonfinite = _drifts(ours, theirs, pairs, lone, limit)
    extra = surplus_call(pairs, lone)
    if extra is not None and (first is None or extra.before <= first[0].before):
        first = extra, Difference.ONLY_A if extra.side == "A" else Difference.ONLY_B
    comparison = TraceComparison(
        verdict=Verdict.EQUAL,
        a=describe(a),
        b=describe(b),
        tolerance=limit.base,
        tolerance_ceiling=limit.ceiling,
        tolerance_reason=limit.reason,
        compared=len(pairs),
        equal=sum(module.equal for module in modules.values()),
        beyond=sum(module.beyond for module in modules.values()),
        lone_a=sum(measurement.side == "A" for measurement in lone),
        lone_b=sum(measurement.side == "B" for measurement in lone),
        ends_differ=end_of(a) != end_of(b),
        parameters_equal=parameters_equal(ours, theirs),
        parameters=compare_parameters(ours, theirs, limit),
        first=divergence(ours, theirs, *first) if first is not None else None,
        first_nonfinite=divergence(ours, theirs, *first_nonfinite) if first_nonfinite is not None else None,
        modules=tuple(modules.values()),
        missing=missing(pairs, lone),
        metrics=compare_metrics(ours, theirs, limit),
        logprobs=compare_logprobs(ours, theirs),
        environment=differing(ours.environment, theirs.environment),
        settings=differing(_settings_of(a), _settings_of(b)),
    )
    return replace(comparison, verdict=_verdict(comparison))


def _verdict(found: TraceComparison) -> Verdict:
    diverged = (
        found.first is not None,
        found.ends_differ,
        any(parameter.beyond for parameter in found.parameters),
        any(metric.beyond for metric in found.metrics),
        any(probe.error > found.tolerance_at(probe.step) or probe.unmatched for probe in found.logprobs),
        found.tolerance == 0 and found.parameters_equal is False,
    )
    if any(diverged):
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


def compare_parameters(a: Trace, b: Trace, tolerance: Tolerance) -> tuple[ParameterDrift, ...]:
    """One value for each parameter that both runs have trained with equally many steps of an optimizer."""
    ours, theirs = _ends(a), _ends(b)
    return tuple(
        parameter_drift(key[1], key[2], ours[key], theirs[key], tolerance.at(key[2])) for key in ours if key in theirs
    )


def _ends(trace: Trace) -> dict[tuple[int, str, int], End]:
    """Where parameters have ended, by the number of their optimizer, their name, and the optimizer's steps."""
    ends = {}
    for number, record in enumerate(seen.what for seen in trace.observed(ParameterEnds)):
        rows = zip(
            record.names, record.dtypes, record.sampled, record.moved, record.distance, record.norm, strict=False
        )
        for name, dtype, sampled, moved, distance, norm in rows:
            if sampled and dtype in DTYPES:
                ends[number, name, record.steps] = End(dtype=dtype, moved=moved / sampled, distance=distance, norm=norm)
    return ends


_ABOUT = frozenset(
    {"name", "summary", "references", "expect", "remedies", "reference", "time_limit", "overhead_budget"}
)
"""What a scenario says about itself and its treatment; none of it changes the run."""


def describe(saved: SavedRun) -> Side:
    """One side of a comparison."""
    trace = saved.run.trace
    sites = {number: site for number, site in trace.sites.items() if site.kind in ALIGNED}
    outputs = [site for site in sites.values() if site.kind == "output"]
    devices = {site.device for site in sites.values()}
    damage = trace.damage
    if trace.folded is not None:
        damage = (*damage, trace.folded.describe())
    return Side(
        label=saved.label,
        watched=trace.header is not None and trace.header.watched,
        complete=trace.end is not None,
        tensors=sum(sample.site in sites for sample in trace.samples),
        modules=len({(site.root, site.fqn) for site in outputs}),
        steps_completed=trace.steps_done,
        ended=ending_of(saved.run).words,
        device="+".join(sorted(devices)),
        dtypes=tuple(name for name, _ in Counter(site.dtype for site in outputs).most_common()),
        findings=tuple((finding.id, named_in(trace, finding).summary) for finding in analysis_of(trace).failures),
        damage=damage,
    )


def end_of(saved: SavedRun) -> tuple[str, ...]:
    """How a run ended, in terms that are the same for two runs that ended alike."""
    run, ending = saved.run, ending_of(saved.run)
    if ending.how is How.DIED:
        return "died", str(run.exit.code), str(run.exit.timed_out)
    if ending.raised is not None:
        return "raised", ending.raised.type, str(ending.raised.step)
    return "completed", str(run.exit.code) if run.foreign else "0"


def _settings_of(saved: SavedRun) -> dict[str, Any]:
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
