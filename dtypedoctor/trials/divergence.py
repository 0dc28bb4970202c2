"""Where two traces first differ, in execution order."""

from collections.abc import Iterator
from typing import NamedTuple

from dtypedoctor.trace.events import Sample
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.alignment import Alignment, Lone, Pair, lane_of
from dtypedoctor.trials.comparison import Difference, Divergence, Measured
from dtypedoctor.trials.tolerance import relative_error

__all__ = ["Found", "divergence_of", "first_divergence"]


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
