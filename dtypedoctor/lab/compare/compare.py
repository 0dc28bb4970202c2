"""Compares two runs, whatever made them different: dtype, device, library versions, attention implementation.

First how far two aligned runs are apart: where they first differ, each module, and what both report per step; then what that says.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot
from typing import Any, NamedTuple, TypeVar

from dtypedoctor.analysis import How, analysis_of, ending_of
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
from dtypedoctor.runner.run import SavedRun
from dtypedoctor.trace.events import Metric, ProbeLogProbs, Resources, Sample, Site
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


def lane_of(stream: Stream) -> str:
    """The part of a run that a stream belongs to: ``loss``, ``backward``, ``gradient``, ``parameter``, or its phase."""
    return _LANES.get(stream.kind, stream.phase)


class Place(NamedTuple):
    """One measurement of a stream: the ``nth`` one, from 1, of that training step."""

    stream: Stream
    step: int
    nth: int


@dataclass(frozen=True, slots=True)
class Pair:
    """A measurement that both traces hold."""

    place: Place
    a: Sample
    b: Sample


@dataclass(frozen=True, slots=True)
class Lone:
    """A measurement that one trace holds alone.

    Attributes:
        side: ``A`` or ``B``.
        before: number (from 0) of the pair before which it was taken; the number of pairs if it was taken after the last.
    """

    side: str
    place: Place
    sample: Sample
    before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Two traces side by side.

    Attributes:
        pairs: what both hold, in the order in which A measured it.
        lone: what only one holds: first A's in its order, then B's in its order.
    """

    pairs: tuple[Pair, ...]
    lone: tuple[Lone, ...]

    @property
    def shared(self) -> frozenset[Stream]:
        """Streams of which at least one measurement is in both."""
        return frozenset(pair.place.stream for pair in self.pairs)


def align(a: Trace, b: Trace) -> Alignment:
    """Pairs the measurements of two traces by module, tensor, phase, training step and order of calls.

    Modules have to have the same dotted names below outermost modules that were seen in the same order.
    """
    theirs = dict(_placed(b))
    pairs: list[Pair] = []
    lone_a: list[Lone] = []
    for place, sample in _placed(a):
        other = theirs.get(place)
        if other is None:
            lone_a.append(Lone("A", place, sample, len(pairs)))
        else:
            pairs.append(Pair(place, sample, other))
    lone_b = _lone_of_b(theirs, {pair.place: number for number, pair in enumerate(pairs)})
    return Alignment(pairs=tuple(pairs), lone=(*lone_a, *lone_b))


def _placed(trace: Trace) -> Iterator[tuple[Place, Sample]]:
    streams = {number: _stream(site) for number, site in trace.sites.items() if site.kind in ALIGNED}
    seen: Counter[tuple[Stream, int]] = Counter()
    for sample in trace.samples:
        stream = streams.get(sample.site)
        if stream is not None:
            seen[stream, sample.step] += 1
            yield Place(stream, sample.step, seen[stream, sample.step]), sample


def _stream(site: Site) -> Stream:
    return Stream(site.root, site.fqn, site.kind, site.index, site.phase)


def _lone_of_b(placed: dict[Place, Sample], paired: dict[Place, int]) -> list[Lone]:
    """B's own measurements, each put before the pair that follows it in B."""
    lone: list[Lone] = []
    following = len(paired)
    for place, sample in reversed(placed.items()):
        number = paired.get(place)
        if number is None:
            lone.append(Lone("B", place, sample, following))
        else:
            following = number
    return lone[::-1]


_Module = tuple[int, str]
_ModuleKey = tuple[str, _Module, str, str]


def missing(alignment: Alignment) -> tuple[Missing, ...]:
    """Everything of which the other trace has nothing at all, A's first, each in execution order.

    Single calls that one run makes more often are not among them: they are counted in the drift of their module.
    """
    shared, end = alignment.shared, len(alignment.pairs)
    lanes = {(stream.root, stream.fqn, lane_of(stream)) for stream in shared}
    known = {"A": _modules(alignment, "A"), "B": _modules(alignment, "B")}
    groups: dict[_ModuleKey, list[Lone]] = {}
    for lone in alignment.lone:
        stream = lone.place.stream
        if stream not in shared:
            whole = (stream.root, stream.fqn) not in known["B" if lone.side == "A" else "A"]
            groups.setdefault(_key(lone.side, stream, whole=whole), []).append(lone)
    return tuple(
        Missing(
            only_in=side,
            root=module[0],
            fqn=module[1],
            lane=lane,
            path=path,
            whole=not lane,
            extra=(*module, lane) in lanes,
            tensors=len(found),
            after_the_end=end > 0 and all(lone.before == end for lone in found),
        )
        for (side, module, lane, path), found in groups.items()
    )


def _modules(alignment: Alignment, side: str) -> set[_Module]:
    """Every module of which one side has measured anything."""
    streams = alignment.shared | {lone.place.stream for lone in alignment.lone if lone.side == side}
    return {(stream.root, stream.fqn) for stream in streams}


def _key(side: str, stream: Stream, *, whole: bool) -> _ModuleKey:
    module = (stream.root, stream.fqn)
    return (side, module, "", "") if whole else (side, module, lane_of(stream), stream.path)


class Found(NamedTuple):
    """A pair that differs, and its number among all pairs, from 0."""

    number: int
    pair: Pair
    difference: Difference


def first_divergence(a: Trace, b: Trace, alignment: Alignment, found: Found | None) -> Divergence | None:
    """The earlier of the first pair that differs, ``found``, and the first call that one run makes and the other does not."""
    lone = min(_surplus(alignment), key=lambda one: one.before, default=None)
    if found is not None and (lone is None or found.number < lone.before):
        return divergence_of(a, b, found)
    return _of_lone(a if lone.side == "A" else b, lone) if lone is not None else None


def _surplus(alignment: Alignment) -> Iterator[Lone]:
    """Calls of streams that both traces have, which only one of them makes.

    Where only one run goes on after the last thing in common, it is merely longer: that is no divergence.
    """
    shared, end = alignment.shared, len(alignment.pairs)
    calls = [lone for lone in alignment.lone if lone.place.stream in shared]
    both_go_on = len({lone.side for lone in calls if lone.before == end}) == 2
    return (lone for lone in calls if lone.before < end or both_go_on)


def divergence_of(a: Trace, b: Trace, found: Found) -> Divergence:
    """What is to be said about a pair that differs."""
    pair, place = found.pair, found.pair.place
    by_magnitude = found.difference is Difference.MAGNITUDE
    return Divergence(
        fqn=place.stream.fqn,
        cls=a.sites[pair.a.site].cls,
        lane=lane_of(place.stream),
        path=place.stream.path,
        step=place.step,
        nth=place.nth,
        difference=found.difference,
        a=_measured(a, pair.a),
        b=_measured(b, pair.b),
        error=relative_error(pair.a.absmax, pair.b.absmax) if by_magnitude else None,
        pairs_before=found.number,
    )


def _of_lone(trace: Trace, lone: Lone) -> Divergence:
    place, measured = lone.place, _measured(trace, lone.sample)
    in_a = lone.side == "A"
    return Divergence(
        fqn=place.stream.fqn,
        cls=trace.sites[lone.sample.site].cls,
        lane=lane_of(place.stream),
        path=place.stream.path,
        step=place.step,
        nth=place.nth,
        difference=Difference.ONLY_A if in_a else Difference.ONLY_B,
        a=measured if in_a else None,
        b=None if in_a else measured,
        error=None,
        pairs_before=lone.before,
    )


def _measured(trace: Trace, sample: Sample) -> Measured:
    site = trace.sites[sample.site]
    return Measured(
        dtype=site.dtype,
        shape=tuple(site.shape),
        absmax=sample.absmax,
        num_nan=sample.num_nan,
        num_inf=sample.num_inf,
    )


_ModuleLane = tuple[int, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifts:
    """What the measurements say; the fields are those of :class:`.TraceComparison`."""

    compared: int
    equal: int
    beyond: int
    first: Divergence | None
    first_nonfinite: Divergence | None
    modules: tuple[ModuleDrift, ...]


def drifts(a: Trace, b: Trace, alignment: Alignment, tolerance: Tolerance) -> Drifts:
    """Compares what is aligned, one measurement with the other."""
    rows: dict[_ModuleLane, _Row] = {}
    found: dict[bool, Found] = {}
    around = _gradients_around(alignment)
    for number, pair in enumerate(alignment.pairs):
        sites = a.sites[pair.a.site], b.sites[pair.b.site]
        difference = _difference(pair, sites, tolerance.at(pair.place.step), around.get(_owner(pair), 0.0))
        _row(rows, pair.place.stream).add(pair, sites, beyond=number if difference is not None else None)
        if difference is not None:
            found.setdefault((pair.a.finite != pair.b.finite), Found(number, pair, difference))
    for lone in alignment.lone:
        _row(rows, lone.place.stream).add_lone(lone, (a if lone.side == "A" else b).sites[lone.sample.site])
    modules = tuple(row.freeze(key) for key, row in rows.items())
    return Drifts(
        compared=len(alignment.pairs),
        equal=sum(module.equal for module in modules),
        beyond=sum(module.beyond for module in modules),
        first=first_divergence(a, b, alignment, min(found.values(), default=None)),
        first_nonfinite=divergence_of(a, b, found[True]) if True in found else None,
        modules=modules,
    )


def _difference(pair: Pair, sites: tuple[Site, Site], tolerance: float, around: float) -> Difference | None:
    a, b = pair.a, pair.b
    if not _may_be_equal(sites[0].shape, sites[1].shape):
        return Difference.SHAPE
    if (a.num_nan, a.num_inf) != (b.num_nan, b.num_inf):
        return Difference.NONFINITE
    if abs(a.absmax - b.absmax) <= tolerance * around:
        return None
    is_loss = pair.place.stream.kind == "loss"
    error = drift(a.absmax, b.absmax, tolerance) if is_loss else relative_error(a.absmax, b.absmax)
    return Difference.MAGNITUDE if error > tolerance else None


def _gradients_around(alignment: Alignment) -> dict[tuple[int, str, int], float]:
    """By module and step the largest gradient of a parameter of it.

    A gradient that is zero in exact arithmetic, as of the bias of an attention's keys, is all rounding: the sums that cancel in it
    are as large as the gradients beside it, and so is the measure of what rounding may do.
    """
    largest: dict[tuple[int, str, int], float] = {}
    for pair in alignment.pairs:
        if pair.place.stream.kind == "grad":
            owner = _owner(pair)
            largest[owner] = max(largest.get(owner, 0.0), pair.a.absmax, pair.b.absmax)
    return largest


def _owner(pair: Pair) -> tuple[int, str, int]:
    stream, step = pair.place.stream, pair.place.step
    owner = stream.fqn.rpartition(".")[0] if stream.kind == "grad" else ""
    return (stream.root if stream.kind == "grad" else -1), owner, step


def _may_be_equal(one: list[int], other: list[int]) -> bool:
    """Whether two shapes may be the same; -1 stands for any size."""
    return len(one) == len(other) and all(x == y or -1 in (x, y) for x, y in zip(one, other, strict=True))


@dataclass(slots=True)
class _Row:
    """The drift of one module in one lane while it is being added up."""

    classes: dict[str, None] = field(default_factory=dict)
    compared: int = 0
    equal: int = 0
    beyond: int = 0
    first_beyond: int | None = None
    only_a: int = 0
    only_b: int = 0
    error: float = 0.0
    error_step: int | None = None
    dtypes: tuple[dict[str, None], dict[str, None]] = field(default_factory=lambda: ({}, {}))
    nonfinite: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, pair: Pair, sites: tuple[Site, Site], *, beyond: int | None) -> None:
        """Adds a pair; ``beyond`` is its number if it is outside the tolerance."""
        a, b = pair.a, pair.b
        self.compared += 1
        if beyond is not None:
            self.beyond += 1
            self.first_beyond = beyond if self.first_beyond is None else self.first_beyond
        elif a.absmax == b.absmax:
            self.equal += 1
        error = relative_error(a.absmax, b.absmax)
        if error > self.error:
            self.error, self.error_step = error, pair.place.step
        self._note(0, sites[0], a)
        self._note(1, sites[1], b)

    def add_lone(self, lone: Lone, site: Site) -> None:
        side = 0 if lone.side == "A" else 1
        self.only_a += side == 0
        self.only_b += side == 1
        self._note(side, site, lone.sample)

    def _note(self, side: int, site: Site, sample: Sample) -> None:
        self.classes[site.cls] = None
        self.dtypes[side][site.dtype] = None
        self.nonfinite[side] += not sample.finite

    def freeze(self, key: _ModuleLane) -> ModuleDrift:
        return ModuleDrift(
            root=key[0],
            fqn=key[1],
            cls=" → ".join(self.classes),
            lane=key[2],
            compared=self.compared,
            equal=self.equal,
            beyond=self.beyond,
            first_beyond=self.first_beyond,
            only_a=self.only_a,
            only_b=self.only_b,
            max_error=self.error,
            max_error_step=self.error_step,
            dtypes_a=tuple(self.dtypes[0]),
            dtypes_b=tuple(self.dtypes[1]),
            nonfinite_a=self.nonfinite[0],
            nonfinite_b=self.nonfinite[1],
        )


def _row(rows: dict[_ModuleLane, _Row], stream: Stream) -> _Row:
    return rows.setdefault((stream.root, stream.fqn, lane_of(stream)), _Row())


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
    a, b = _values(ours, name), _values(theirs, name)
    keys, shared = sorted(a.keys() | b.keys()), sorted(a.keys() & b.keys())
    errors = {key: _error(a[key], b[key], tolerance.at(key[0])) for key in shared}
    return MetricDrift(
        name=name,
        steps=tuple(step for step, _ in keys),
        a=tuple(map(a.get, keys)),
        b=tuple(map(b.get, keys)),
        max_error=max(errors.values(), default=0.0),
        beyond=tuple(step for (step, _), error in errors.items() if error > tolerance.at(step)),
        lone=tuple(step for step, _ in sorted(a.keys() ^ b.keys())),
    )


def _error(a: float | None, b: float | None, tolerance: float) -> float:
    """Relative error; 1 where only one is finite, 0 where neither is or both are too close to tell."""
    if a is None or b is None:
        return 0.0 if a is b else 1.0
    return drift(a, b, tolerance)


def _values(records: Mapping[_Key, Metric], name: str) -> dict[_Key, float | None]:
    """One number of the records that report it; None where it is not finite."""
    return {
        key: record.values.get(name)
        for key, record in records.items()
        if name in record.values or name in record.nonfinite
    }


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
    alignment = align(ours, theirs)
    found = drifts(ours, theirs, alignment, limit)
    lone = Counter(one.side for one in alignment.lone)
    comparison = TraceComparison(
        verdict=Verdict.EQUAL,
        a=describe(a),
        b=describe(b),
        tolerance=limit.base,
        tolerance_ceiling=limit.ceiling,
        tolerance_reason=limit.reason,
        compared=found.compared,
        equal=found.equal,
        beyond=found.beyond,
        lone_a=lone["A"],
        lone_b=lone["B"],
        ends_differ=end_of(a) != end_of(b),
        parameters_equal=_parameters_equal(ours, theirs),
        parameters=compare_parameters(ours, theirs, limit),
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
        or any(parameter.beyond for parameter in found.parameters)
        or any(metric.beyond for metric in found.metrics)
        or any(probe.error > found.tolerance_at(probe.step) or probe.unmatched for probe in found.logprobs)
        or (found.tolerance == 0 and found.parameters_equal is False)
    )


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


def _parameters_equal(a: Trace, b: Trace) -> bool | None:
    """Whether the checksums over the trained parameters are the same; None where one is not there."""
    ours, theirs = a.last(Resources), b.last(Resources)
    if ours is None or theirs is None or ours.checksum is None or theirs.checksum is None:
        return None
    return ours.checksum == theirs.checksum


_ABOUT = frozenset(
    {"name", "summary", "references", "expect", "remedies", "reference", "time_limit", "watch_every", "overhead_budget"}
)
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
        findings=tuple((finding.id, finding.summary) for finding in analysis_of(trace).failures),
        damage=(trace.damage if trace.folded is None else (*trace.damage, trace.folded.describe())),
    )


def _commonest_first(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name, _ in Counter(names).most_common())


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
