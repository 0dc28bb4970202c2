"""Which values outside of modules that are not finite got anywhere: a number that the program reads, a test, the end of the program.

The sentinel (``instrument/bad_values.py``) says what it saw; here is decided what of it is a failure. An infinity that was asked for by
name is none, nor is a value that the program tests for and replaces.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from dtypedoctor.diagnosis.births import ancestry, has_nan
from dtypedoctor.diagnosis.ops import OpGraph, graph_of
from dtypedoctor.trace.events import Observed, Op, ScalerState
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trace.records.values import NonfiniteReached

__all__ = ["Reached", "behind", "links", "reached"]

ENDS = {
    "item": "is read as a number",
    "guard": "is tested for",
    "numbers": "leaves torch as numbers",
    "saved": "is saved, or sent to another process,",
    "alive": "is left at the end of the program",
    "unused": "is computed and never used",
}
"""Where a value can get to besides losses, gradients and modules, and how that is said."""
LEAVING = frozenset({"numbers", "saved"})
"""Ends at which all of a tensor is read, and nothing is known of what becomes of it."""


@dataclass(frozen=True, slots=True)
class Reached:
    """A value that got somewhere. ``seen`` is what the sentinel saw of it."""

    seen: Observed[NonfiniteReached]

    @property
    def got(self) -> str:
        """Where it got to, in words."""
        where = f" at {self.source}" if self.source else ""
        return f"{ENDS[self.seen.what.what]}{where}"

    @property
    def source(self) -> str | None:
        """The line that reads it."""
        return self.seen.what.source


def reached(trace: Trace) -> Iterator[Reached]:
    """The values that got to an end that counts, in order."""
    found = [seen for seen in trace.observed(NonfiniteReached) if seen.what.what in ENDS]
    graph = graph_of(trace)
    skipped = {state.step for state in trace.all(ScalerState) if state.skipped}
    trained = _finite_losses(trace)
    tested = {seen.what.id for seen in found if seen.what.what == "guard"}
    for seen in found:
        if seen.what.what in LEAVING and seen.what.id in tested:
            continue
        if seen.what.what == "guard" and any(n > seen.n for n in trained):
            continue  # tested, and left out: the training has gone on from losses that are finite
        last = behind(graph, seen)
        if last is None:
            counts = seen.what.what == "item" and seen.what.value == "nan" and seen.step not in skipped
        else:
            counts = _counts(graph, seen, last, skipped)
        if counts:
            yield Reached(seen)


def _finite_losses(trace: Trace) -> list[int]:
    """When backward passes began at a loss that is finite."""
    sites = trace.sites
    return [s.n for s in trace.samples if s.finite and s.site in sites and sites[s.site].kind == "loss"]


def behind(graph: OpGraph, seen: Observed[NonfiniteReached]) -> Op | None:
    """The op that made what was seen; None where it is not known."""
    return graph.producer_of(seen.what.id)


def links(trace: Trace, numbers: Collection[int], call: int) -> Iterator[Observed[NonfiniteReached]]:
    """What the sentinel has seen of the losses and gradients with these numbers of samples, and of what went into a module call."""
    for seen in trace.observed(NonfiniteReached):
        what = seen.what.what
        if (what in ("loss", "gradient") and seen.what.sample in numbers) or (
            what == "call" and seen.call == call and seen.what.value != "-inf" and seen.n < min(numbers)
        ):
            yield seen


def _counts(graph: OpGraph, seen: Observed[NonfiniteReached], last: Op, skipped: Collection[int]) -> bool:
    what, value = seen.what.what, seen.what.value
    found = ancestry(graph, last)
    if not found.computed and not found.nan_makers:
        given = any(has_nan(tensor) for _, tensor in found.given)
        return given and what == "item" and seen.step not in skipped
    if not found.computed and value != "nan":
        return False
    return what == "item" or what in LEAVING or not _is_replaced(graph, last)


def _is_replaced(graph: OpGraph, last: Op) -> bool:
    """Whether the value, or one that it was computed from, also went into an op whose results are all finite."""
    seen: set[int] = set()
    waiting = [last]
    while waiting:
        op = waiting.pop()
        if op.n in seen:
            continue
        seen.add(op.n)
        for tensor in op.outputs:
            if not tensor.finite and any(all(t.finite for t in user.outputs) for user in graph.consumers(tensor)):
                return True
        makers = (graph.producer(tensor) for tensor in op.inputs if not tensor.finite)
        waiting += [maker for maker in makers if maker is not None]
    return False
