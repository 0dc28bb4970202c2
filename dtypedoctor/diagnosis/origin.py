"""The op at which a non-finite value came into being, with everything that was measured about it."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from dtypedoctor.diagnosis.births import ancestry, bad_ends, has_nan, last_bad_before, only_negative_inf
from dtypedoctor.diagnosis.experiments import attention_experiment
from dtypedoctor.diagnosis.incidents import GRADIENTS, Incident, incidents
from dtypedoctor.diagnosis.ops import OpGraph, overload_free
from dtypedoctor.diagnosis.reached import behind, links
from dtypedoctor.diagnosis.vanished import overflow_behind
from dtypedoctor.diagnosis.wording import limit_of
from dtypedoctor.trace.events import Op, Replay, Sample, TensorNote
from dtypedoctor.trace.reader import Trace

__all__ = ["NARROW", "SOFTMAX", "Origin", "Search", "search", "searched"]

NARROW = frozenset({"float16", "float8_e5m2", "float8_e4m3fn"})
"""Dtypes whose range is smaller than float32's. A value that float32 cannot hold either is no precision problem."""

SOFTMAX = frozenset({"_softmax", "softmax", "_safe_softmax", "_log_softmax", "log_softmax"})
PRODUCTS = frozenset({"mm", "bmm", "baddbmm", "addmm", "matmul", "addbmm"})
FLOAT32_MAX = limit_of("float32")
NEAR_THE_LIMIT = 0.25
"""Share of a dtype's range; where finite elements are beyond it, infinite ones beside them may be an overflow."""
MASK = 0.99
"""Share of a dtype's range beyond which a number is not computed but chosen, for a mask to add."""
MAX_TRIED = 20
"""Bad values of one call whose origin is looked for, the last first."""


@dataclass(frozen=True)
class Origin:
    """Where a failure began.

    Attributes:
        graph: the op trace.
        op: the op that made the value, or the first that used one it was given.
        given: the operand that was not finite when the window opened, where no op in it made the value.
        incident: what the watch saw of it.
        masked: whether ``op`` is a softmax over rows in which everything is ``-inf``.
    """

    graph: OpGraph
    op: Op
    incident: Incident
    given: TensorNote | None = None
    masked: bool = False

    @property
    def trace(self) -> Trace:
        """The trace of all this."""
        return self.graph.trace

    @cached_property
    def replay(self) -> Replay | None:
        """The same op on the same operands in a wider dtype."""
        return self.graph.replay(self.op, "float32", "float64")

    @cached_property
    def program(self) -> Replay | None:
        """The same op on the operands that the program would have, had it been float32 since the op trace began."""
        return self.graph.replay(self.op, "float32-program")

    @property
    def result(self) -> TensorNote:
        """The first result that is not finite."""
        return next((t for t in self.op.outputs if not t.finite), self.op.outputs[0])

    @property
    def dtype(self) -> str:
        """The dtype of what is not finite: of the operand that was given, else of the result."""
        return self.given.dtype if self.given is not None else self.result.dtype

    @property
    def leaves_a_narrow_range(self) -> bool:
        """Whether float32 holds the result and the op's own dtype does not."""
        replay = self.replay
        if replay is None or not replay.finite or self.result.dtype not in NARROW:
            return False
        return replay.absmax is None or replay.absmax <= FLOAT32_MAX

    @property
    def is_proven(self) -> bool:
        """Whether the replay's magnitude is one that the op's own dtype cannot hold."""
        found = self.replay
        return found is not None and found.absmax is not None and found.absmax > limit_of(self.result.dtype)


@dataclass(frozen=True)
class Search:
    """What the op trace says of an incident.

    Attributes:
        covered: whether the op trace was open there.
        origin: where it began; None where every infinity had been asked for and got nowhere, or nothing could be followed.
        harmless: whether the trace shows that nothing went wrong.
    """

    covered: bool
    origin: Origin | None = None
    harmless: bool = False


def searched(graph: OpGraph) -> Iterator[tuple[Incident, Search]]:
    """Every incident with what is known of it, the earliest first, without those that only repeat a harmless one.

    A model that masks its own logits returns ``-inf`` at each call. Where the op trace has shown that of one call, the same
    modules may return infinities in the others too, as long as nothing there is NaN or close to the end of its range.
    """
    masking: set[tuple[int, str, str]] = set()
    for incident in incidents(graph.trace):
        if _only_repeats(incident, masking, graph.trace):
            continue
        found = search(graph, incident)
        if found.harmless:
            masking.update(_where(graph.trace, sample) for sample in incident.samples)
        yield incident, found


def _where(trace: Trace, sample: Sample) -> tuple[int, str, str]:
    """The module that returned it, and the dtype; not the shape, which grows while a text is generated."""
    site = trace.sites[sample.site]
    return site.root, site.fqn, site.dtype


def _only_repeats(incident: Incident, masking: Collection[tuple[int, str, str]], trace: Trace) -> bool:
    if incident.kind != "output":
        return False
    return all(
        _where(trace, sample) in masking
        and not sample.num_nan
        and sample.absmax < NEAR_THE_LIMIT * limit_of(trace.sites[sample.site].dtype)
        for sample in incident.samples
    )


def search(graph: OpGraph, incident: Incident) -> Search:
    """Looks for the origin of an incident, going back from the last of its bad values, which is where they got to.

    What the sentinel has seen of it is enough where it has seen the operator that made the value.
    """
    seen = _seen_outside(graph, incident)
    if seen is not None:
        return Search(covered=True, origin=seen)

    def inside(op: Op) -> bool:
        if op.sentinel:
            return False
        if incident.phase == "optimizer":
            return op.phase == "optimizer" and op.step == incident.step
        if incident.kind in GRADIENTS:  # a backward pass goes through all calls that the loss was made of
            return op.phase not in ("forward", "generate") and op.step == incident.step
        return op.call == incident.call

    if not any(op.n < incident.n and inside(op) for op in graph.ops):
        return Search(covered=False)
    if incident.kind in GRADIENTS | {"param"}:  # each gradient is used by itself, so the earliest origin of all counts
        followed = bad_ends(graph, incident.last_n, inside)
        origins = [origin for op in followed if (origin := _origin(graph, op, incident)) is not None]
        origin = min(origins, key=lambda o: o.op.n, default=None)
    else:
        ends = [last_bad_before(graph, n, inside) for n in incident.numbers[-MAX_TRIED:]]
        followed = [op for op in reversed(ends) if op is not None]
        found = (_origin(graph, op, incident) for op in followed)
        origin = next((origin for origin in found if origin is not None), None)
    harmless = bool(followed) and origin is None and incident.kind != "grad"  # nothing masks what an optimizer is given
    return Search(covered=True, origin=origin, harmless=harmless)


def _seen_outside(graph: OpGraph, incident: Incident) -> Origin | None:
    """The origin that the sentinel has recorded; of a value that only reached Python also where somebody else had made it."""
    if incident.reached is not None:
        last = behind(graph, incident.reached.seen)
        return _origin(graph, last, incident) if last is not None else None
    ends = (behind(graph, link) for link in links(graph.trace, incident.numbers, incident.call))
    origins = [
        o for op in ends if op is not None and (o := _origin(graph, op, incident)) is not None and o.given is None
    ]
    return min(origins, key=lambda o: o.op.n, default=None)


def _origin(graph: OpGraph, last: Op, incident: Incident) -> Origin | None:
    found = ancestry(graph, last)
    maker = found.nan_makers[0] if found.nan_makers else None
    if maker is not None and _masks_everything(graph, maker, found.computed):
        return Origin(graph, maker, incident, masked=True)
    computed = next((op for op in found.computed), None)
    given = [(op, t) for op, t in found.given if _counts(t)]
    named = next(((op, t) for op, t in given if t.name is not None), None)
    if named is not None and (computed is None or named[0].n < computed.n):
        return Origin(graph, named[0], incident, given=named[1])
    if computed is not None:
        return Origin(graph, _root_of(graph, computed), incident)
    if given:
        return Origin(graph, given[0][0], incident, given=given[0][1])
    return Origin(graph, maker, incident) if maker is not None else None


def _root_of(graph: OpGraph, op: Op) -> Op:
    """The op itself, or the overflow that made 0 of what it divides by, where no wider dtype helps it with the operands that it has."""
    replay = graph.replay(op, "float32", "float64")
    helped = replay is None or (replay.finite and (replay.absmax is None or replay.absmax <= FLOAT32_MAX))
    return op if helped else overflow_behind(graph, op) or op


def _masks_everything(graph: OpGraph, maker: Op, computed: tuple[Op, ...]) -> bool:
    """Whether a softmax made NaN of rows of ``-inf`` that come from a mask and not from a product that overflowed.

    Both may have happened at once; the experiment on the same attention says which of them the rows that are NaN come from.
    """
    tried = attention_experiment(graph.trace, maker)
    if tried is not None:
        return tried.is_of_the_mask
    bad = [t for t in maker.inputs if not t.finite]
    if overload_free(maker.op) not in SOFTMAX or not bad or not only_negative_inf(bad):
        return False
    return not any(overload_free(op.op) in PRODUCTS or _leaves_the_range(graph, op) for op in computed)


def _leaves_the_range(graph: OpGraph, op: Op) -> bool:
    """Whether ``op`` makes infinities of ordinary numbers, and not by adding something to the smallest number of a mask."""
    replay = graph.replay(op, "float32", "float64")
    limit = limit_of(next((t.dtype for t in op.outputs if not t.finite), ""))
    if replay is None or replay.absmax is None or not limit < replay.absmax <= FLOAT32_MAX:
        return False
    masks = any(t.absmax is not None and t.absmax >= MASK * limit for t in op.inputs)
    return not masks and not any(abs(number) >= MASK * limit for number in _numbers(op))


def _numbers(op: Op) -> Iterator[float]:
    """The numbers among an op's arguments that are no tensors."""
    for text in op.scalars:
        try:
            yield float(text)
        except ValueError:  # a truth value, a list
            continue


def _counts(tensor: TensorNote) -> bool:
    """Whether an operand from outside is a failure: ``-inf`` is a mask, but no weight, and a lone number a constant."""
    if tensor.origin == "parameter":
        return not tensor.finite
    return (has_nan(tensor) or tensor.num_posinf > 0) and bool(tensor.shape or tensor.name)
