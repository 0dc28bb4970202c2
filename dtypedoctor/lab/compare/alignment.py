"""Lays two traces side by side: which measurement of one belongs to which of the other, and what only one has measured."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dtypedoctor.lab.compare.comparison import Missing
from dtypedoctor.trace.events import Sample, Site
from dtypedoctor.trace.model import Trace

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
_Key = tuple[str, _Module, str, str]


def missing(alignment: Alignment) -> tuple[Missing, ...]:
    """Everything of which the other trace has nothing at all, A's first, each in execution order.

    Single calls that one run makes more often are not among them: they are counted in the drift of their module.
    """
    shared, end = alignment.shared, len(alignment.pairs)
    lanes = {(stream.root, stream.fqn, lane_of(stream)) for stream in shared}
    known = {"A": _modules(alignment, "A"), "B": _modules(alignment, "B")}
    groups: dict[_Key, list[Lone]] = {}
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


def _key(side: str, stream: Stream, *, whole: bool) -> _Key:
    module = (stream.root, stream.fqn)
    return (side, module, "", "") if whole else (side, module, lane_of(stream), stream.path)
