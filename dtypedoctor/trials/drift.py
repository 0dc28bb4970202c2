"""How far aligned measurements are apart: in sum, module by module, and where that begins."""

from dataclasses import dataclass, field

from dtypedoctor.trace.events import Sample, Site
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.alignment import Alignment, Lone, Pair, Stream, lane_of
from dtypedoctor.trials.comparison import Difference, Divergence, ModuleDrift
from dtypedoctor.trials.divergence import Found, divergence_of, first_divergence
from dtypedoctor.trials.tolerance import Tolerance, drift, relative_error

__all__ = ["Drifts", "drifts"]

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
            found.setdefault(_in_finiteness(pair), Found(number, pair, difference))
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


def _in_finiteness(pair: Pair) -> bool:
    return pair.a.finite != pair.b.finite


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
