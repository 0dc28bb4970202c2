"""The operator at which a non-finite value originates, with everything that was measured about it.

Read in this order: experiments on attention, values that rounding made 0, the origin itself, the search for it, which
incidents are failures; last, what an op trace would have to settle of a run and has not.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from dtypedoctor.diagnosis.incidents import GRADIENTS, Incident, behind, incidents, links, unsettled
from dtypedoctor.diagnosis.ops import (
    Ancestry,
    OpGraph,
    ancestry,
    asked_for,
    bad_ends,
    graph_of,
    has_nan,
    last_bad_before,
    nonfinite,
    numbers,
    only_negative_inf,
    overload_free,
)
from dtypedoctor.diagnosis.wording import is_dtype_error, limit_of, module_of, operators_were_seen
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.events import AFTER_STEP, Op, ParameterNote, Raised, Replay, ScalerState, TensorNote
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import AttentionReplayed, EagerCall, PackedWeight, ReplayedCall, RoundedBefore
from dtypedoctor.trace.records.silent import GradientZeros, ScaledBackward

SDPA = "torch.nn.functional.scaled_dot_product_attention"


@dataclass(frozen=True)
class AttentionExperiment:
    """Attention that was written out in steps, run again on the same operands: what its record shows."""

    what: AttentionReplayed

    @property
    def is_of_the_mask(self) -> bool:
        """Whether every row that is NaN is one in which everything is masked."""
        return self.what.unattended == self.what.nan_rows and self.what.unmasked_finite

    @property
    def is_of_the_scores(self) -> bool:
        """Whether keeping the scores in float32 is all that it takes."""
        what = self.what
        return what.exact_finite and what.sdpa_finite and what.unattended < what.nan_rows

    @property
    def evidence(self) -> tuple[str, ...]:
        """What was measured, in sentences."""
        what = self.what
        rows = f"The softmax makes {what.nan_rows} rows NaN; in {what.unattended} of them the mask leaves nothing."
        if self.is_of_the_mask:
            return (rows, "With the same scores and no mask it is finite.")
        if self.is_of_the_scores:
            return (
                f"The same queries, keys, values, scale and mask through {SDPA} are finite, absmax {what.sdpa_absmax:.6g}.",
            )
        return (rows,)


def attention_experiment(trace: Trace, op: Op) -> AttentionExperiment | None:
    """The experiment on the attention that ``op`` is the product of queries and keys of, or the softmax; None without one."""
    made = (seen.what for seen in trace.observed(AttentionReplayed) if op.n in (seen.what.scores, seen.what.softmax))
    return next(map(AttentionExperiment, made), None)


def rounded_before(graph: OpGraph, op: Op) -> RoundedBefore | None:
    """The rounding without which ``op`` is finite; None where its own dtype is all that matters, or no rounding is known to matter."""
    return next((seen.what for seen in graph.trace.observed(RoundedBefore) if seen.what.of == op.n), None)


def rounds_to(text: str, dtype: str) -> int | None:
    """0, 1 or -1, where a number that is none of these rounds to it; epsilons and the bounds of probabilities do."""
    known = DTYPES.get(dtype)
    try:
        value = float(text)
    except ValueError:
        return None
    if known is None or value in (0.0, 1.0, -1.0):
        return None
    if abs(value) <= known.smallest / 2:
        return 0
    spacing = known.epsilon if abs(value) > 1 else known.epsilon / 2
    return (1 if value > 0 else -1) if abs(abs(value) - 1) <= spacing / 2 else None


NARROW = frozenset({"float16", "complex32", "float8_e5m2", "float8_e4m3fn"})
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
        written: whether ``op`` writes inf or NaN because the code names it, or leaves memory as it was.
        unseen: an operand that held something else when an op had made it than when another, the first of the two here, used it: code that passes no
            operator has written to it. ``op`` comes before it, and is taken to have reached it; or it is the one that has made the operand, where nothing
            was bad before it.
    """

    graph: OpGraph
    op: Op
    incident: Incident
    given: TensorNote | None = None
    masked: bool = False
    written: bool = False
    unseen: tuple[Op, TensorNote] | None = None

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
        """See :meth:`OpGraph.program`."""
        return self.graph.program(self.op)

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
    trace = graph.trace
    masking: set[tuple[int, str, str]] = set()
    for incident in incidents(trace):
        # The modules that returned it, and the dtypes; not the shapes, which grow while a text is generated
        sites = [trace.sites[sample.site] for sample in incident.samples]
        places = [(site.root, site.fqn, site.dtype) for site in sites]
        repeats = incident.kind == "output" and all(
            place in masking and not sample.num_nan and sample.absmax < NEAR_THE_LIMIT * limit_of(place[2])
            for place, sample in zip(places, incident.samples, strict=True)
        )
        if not repeats:
            found = search(graph, incident)
            if found.harmless:
                masking.update(places)
            yield incident, found


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
        if (
            incident.kind in GRADIENTS
        ):  # a backward pass goes through all calls that the loss was made of, in the last of them
            is_of_it = op.step >= incident.step if graph.trace.by_call else op.step == incident.step
            return is_of_it and op.phase not in ("forward", "generate")
        return op.call == incident.call

    if not any(op.n < incident.n and inside(op) for op in graph.ops):
        return Search(covered=False)
    if incident.kind in GRADIENTS | {"param"}:  # each gradient is used by itself, so the earliest origin of all counts
        followed = bad_ends(graph, incident.last_n, inside)
        origin = _earliest(origin for op in followed if (origin := _origin(graph, op, incident)) is not None)
    else:
        ends = [last_bad_before(graph, n, inside) for n in incident.numbers[-MAX_TRIED:]]
        followed = [op for op in reversed(ends) if op is not None]
        found = (_origin(graph, op, incident) for op in followed)
        origin = next((origin for origin in found if origin is not None), None)
    if origin is None and incident.kind == "loss":
        # What a loss got that no operator had made, outside of modules or in the last call, where no module had returned anything like it
        measured = graph.trace.measured()
        returned = any(s.n < incident.n and not s.finite and site.kind == "output" for s, site in measured)
        if not returned and operators_were_seen(graph.trace):
            origin = _earliest(_origins_outside(graph, incident))
    harmless = bool(followed) and origin is None and incident.kind != "grad"  # nothing masks what an optimizer is given
    return Search(covered=True, origin=origin, harmless=harmless)


def _seen_outside(graph: OpGraph, incident: Incident) -> Origin | None:
    """The origin that the sentinel has recorded; of a value that only reached Python also where somebody else had made it."""
    if incident.reached is not None:
        last = behind(graph, incident.reached.seen)
        return _origin(graph, last, incident) if last is not None else None
    return _earliest(origin for origin in _origins_outside(graph, incident) if origin.given is None)


def _origins_outside(graph: OpGraph, incident: Incident) -> Iterator[Origin]:
    for link in links(graph.trace, incident.numbers, incident.call):
        op = behind(graph, link)
        origin = _origin(graph, op, incident) if op is not None else None
        # -inf that a model is given is a mask, unless ordinary numbers overflow to it
        is_mask = link.what.what == "call" and link.what.value == "-inf"
        if origin is None or (is_mask and not _leaves_the_range(graph, origin.op)):
            continue
        # What is prepared for a call belongs to its step
        if origin.op.phase == AFTER_STEP and link.what.what == "call":
            origin = replace(origin, op=replace(origin.op, step=link.step, call=link.call, phase=link.phase))
        yield origin


def _earliest(origins: Iterable[Origin]) -> Origin | None:
    return min(origins, key=lambda origin: origin.op.n, default=None)


def _origin(graph: OpGraph, last: Op, incident: Incident) -> Origin | None:
    found = ancestry(graph, last)
    maker = next(iter(found.nan_makers), None)
    if maker is not None and _masks_everything(graph, maker, found.computed):
        return Origin(graph, maker, incident, masked=True)
    computed = next(iter(found.computed), None)
    first = _given_before(found, computed)
    if first is not None:
        return Origin(graph, first[0], incident, given=first[1])
    if computed is not None:
        return Origin(graph, _root_of(graph, computed), incident)
    if found.unseen:
        return _behind_unseen(graph, found.unseen[0], incident)
    wrote = _written(graph, found, maker, incident)
    if wrote is not None:
        return Origin(graph, wrote, incident, written=True)
    return Origin(graph, maker, incident) if maker is not None else None


def _behind_unseen(graph: OpGraph, use: tuple[Op, TensorNote], incident: Incident) -> Origin | None:
    """The origin of what code that passes no operator has written to an operand: of the last bad value that it can have read, where there is one."""
    user, tensor = use

    def may_be_read(op: Op) -> bool:
        return op.n < user.n and op.call == user.call and bool(nonfinite(op.outputs)) and not asked_for(op)

    for op in reversed(list(filter(may_be_read, graph.ops))[-MAX_TRIED:]):
        before = _origin(graph, op, incident)
        # An accumulator that begins with -inf is handed to such a kernel, too
        if before is not None and not before.written:
            return replace(before, unseen=before.unseen or use)
    maker = graph.producer(tensor)
    return Origin(graph, maker, incident, unseen=use) if maker is not None else None


def _given_before(found: Ancestry, computed: Op | None) -> tuple[Op, TensorNote] | None:
    """The operand from outside that comes before what was computed, with the op that used it; one with a name wherever there is one."""
    given = [(op, tensor) for op, tensor in found.given if _counts(tensor)]
    named = next(((op, tensor) for op, tensor in given if tensor.name is not None), None)
    if computed is not None:
        return named if named is not None and named[0].n < computed.n else None
    return named or next(iter(given), None)


def _written(graph: OpGraph, found: Ancestry, maker: Op | None, incident: Incident) -> Op | None:
    """The op that writes inf or NaN which the code names, or leaves it in memory as it was, if that is what spoils the run.

    A program may mark with such a number what is missing or too far, and mask with ``-inf``. So where ``maker`` makes NaN of it, the number has to
    come from another module, and is no mask if ``maker`` is a softmax. Where none does, a loss, a gradient, a weight or what the program gets from a
    model has to end that way.
    """
    may_mask = incident.kind == "output" if maker is None else overload_free(maker.op) in SOFTMAX
    wrote = [op for op in found.asked if nonfinite(op.outputs)]
    if may_mask:
        wrote = [op for op in wrote if not only_negative_inf(op.outputs)]
    if maker is not None:
        return next((op for op in wrote if op.fqn not in ("", maker.fqn)), None)

    # Of a program that trains nothing it counts whether it gets NaN from what it calls
    trace = graph.trace
    if {site.kind for site in trace.sites.values()}.isdisjoint(_TRAINED):
        spoils = any(s.num_nan and site.kind == "output" and not site.fqn for s, site in trace.measured())
    else:
        spoils = any(site.kind in _TRAINED and not sample.finite for sample, site in trace.measured())
    return wrote[0] if wrote and spoils else None


_TRAINED = ("loss", "grad", "param")


def _root_of(graph: OpGraph, op: Op) -> Op:
    """The op itself, or the overflow that made 0 of what it divides by, where no wider dtype helps it with the operands that it has.

    The reciprocal root of inf is 0, and so is what a norm then returns.
    """
    replay = graph.replay(op, "float32", "float64")
    if replay is None or (replay.finite and (replay.absmax is None or replay.absmax <= FLOAT32_MAX)):
        return op
    rounded = rounded_before(graph, op)
    overflows = rounded is not None and rounded.overflows
    return next((maker for maker in graph.ops if overflows and rounded and maker.n == rounded.n), op)


def _masks_everything(graph: OpGraph, maker: Op, computed: tuple[Op, ...]) -> bool:
    """Whether a softmax made NaN of rows of ``-inf`` that come from a mask and not from a product that overflowed.

    Both may have happened at once; the experiment on the same attention says which of them the rows that are NaN come from.
    """
    tried = attention_experiment(graph.trace, maker)
    if tried is not None:
        return tried.is_of_the_mask
    bad = nonfinite(maker.inputs)
    if overload_free(maker.op) not in SOFTMAX or not bad or not only_negative_inf(bad):
        return False
    return not any(overload_free(op.op) in PRODUCTS or _leaves_the_range(graph, op) for op in computed)


def _leaves_the_range(graph: OpGraph, op: Op) -> bool:
    """Whether ``op`` makes infinities of ordinary numbers, and not by adding something to the smallest number of a mask."""
    replay = graph.replay(op, "float32", "float64")
    limit = limit_of(next((t.dtype for t in op.outputs if not t.finite), ""))
    if replay is None or replay.absmax is None or not limit < replay.absmax <= FLOAT32_MAX:
        return False
    magnitudes = [t.absmax for t in op.inputs if t.absmax is not None] + [abs(number) for number in numbers(op)]
    return not any(magnitude >= MASK * limit for magnitude in magnitudes)


def _counts(tensor: TensorNote) -> bool:
    """Whether an operand from outside is a failure: ``-inf`` is a mask, but no weight, and a lone number a constant."""
    if tensor.origin == "parameter":
        return not tensor.finite
    return (has_nan(tensor) or tensor.num_posinf > 0) and bool(tensor.shape or tensor.name)


def is_of_the_loss_scale(origin: Origin) -> bool:
    """Whether a gradient overflows only because a loss scaler has multiplied it, so that halving the scale fixes it.

    Backward ops are linear in the gradient, so at scale 1 their result is the replay's divided by the scale. That is as good where no step follows: a backward
    pass leaves gradients in modules, too, whose optimizer does not take them.
    """
    scale = loss_scale(origin)
    replay = origin.replay
    if origin.incident.kind not in GRADIENTS or scale is None or replay is None or replay.absmax is None:
        return False
    return replay.finite and replay.absmax / scale <= limit_of(origin.result.dtype)


def loss_scale(origin: Origin) -> float | None:
    """The scale of the loss from which a backward op's gradient comes; None of other ops, and where no scaler has looked at the gradients."""
    if origin.op.phase != "backward":
        return None
    of_step = (state for state in origin.trace.all(ScalerState) if state.step == origin.op.step)
    return next((state.scale for state in of_step if state.n > origin.op.n), None)


def unexplained(trace: Trace) -> Incident | None:
    """The first incident that the op trace does not show to be harmless, and that is no business of the loss scale's."""
    return next((incident for incident, _ in that_matter(graph_of(trace))), None)


def that_matter(graph: OpGraph) -> Iterator[tuple[Incident, Search]]:
    """Each incident that the op trace does not show to be harmless, with what it says of it."""
    settles = not unsettled(graph.trace)
    for incident, found in searched(graph):
        if finite_in_eager_mode(graph.trace, incident) is not None:
            yield incident, found
        elif found.harmless:
            continue
        elif found.origin is not None and is_of_the_loss_scale(found.origin):
            settles = True
        elif settles and found.origin is None and _is_skipped(graph.trace, incident):
            continue  # the same at a scale not much smaller, or the scaler looks for a scale that fits
        else:
            yield incident, found


def _is_skipped(trace: Trace, incident: Incident) -> bool:
    """Whether a bad gradient is of a step that a loss scaler skipped."""
    states = trace.all(ScalerState)
    return incident.kind in GRADIENTS and any(state.skipped and state.step == incident.step for state in states)


def finite_in_eager_mode(trace: Trace, incident: Incident) -> EagerCall | None:
    """The incident's call made again in eager mode, where it was not finite compiled a second time and finite in eager mode."""
    again = next((seen.what for seen in trace.observed(EagerCall) if seen.call == incident.call), None)
    return again if again is not None and not again.finite and again.eager_finite else None


def is_unsettled(trace: Trace) -> bool:
    """Whether an op trace would tell more: of a refused op, else of non-finite values that matter, else of packed weights that may be dequantized
    wrongly, else of gradients that may have been flushed to zero."""
    raised = trace.last(Raised)
    # whether a product may have been given packed storage, whose shape is refused before its dtype is
    if raised is not None and (
        is_dtype_error(raised)
        or ("shapes cannot be multiplied" in raised.message and any(note.quant for note in trace.all(ParameterNote)))
    ):
        return graph_of(trace).failed() is None
    if incidents(trace):
        # The op trace lacks the first incident that is not harmless, or ends at a parameter that was written before it.
        for _, seen in searched(graph_of(trace)):
            if not seen.covered:
                return True
            if not seen.harmless:
                return seen.origin is not None and _was_written_between(trace, seen.origin)
        return False
    if doubtful_weights(trace):
        return True
    # float16 gradients are zero for the most part, no loss scaler lifts them, and they were not computed from a multiplied loss
    return bool(trace.observed(GradientZeros)) and not (trace.all(ScalerState) or trace.observed(ScaledBackward))


def doubt_in_words(trace: Trace) -> str:
    """What only the op trace can settle, where the run shows no failure; empty where there is nothing."""
    if not is_unsettled(trace):
        return ""
    zeros = trace.observed(GradientZeros)
    if zeros and not incidents(trace) and not doubtful_weights(trace):
        names = list(zeros[0].what.parameters)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"most of the float16 gradient of {names[0]}{more} is zero in {trace.moment(zeros[0].step)} and there is no loss scaler; only a "
            "backward pass with the loss multiplied can tell whether float16 has flushed it to zero"
        )
    return "something that only an op trace can settle was seen, and there is none"


def _was_written_between(trace: Trace, origin: Origin) -> bool:
    """Whether a parameter that no op has made bad was fine in an earlier call, and what came before this call was not looked at."""
    given, incident = origin.given, origin.incident
    if given is None or given.name is None or given.origin != "parameter" or incident.phase != "forward":
        return False
    if any(op.call < incident.call and not op.sentinel for op in origin.graph.ops):
        return False
    return _returned_finite(trace, origin.op.root, module_of(given.name), before=incident.call)


def _returned_finite(trace: Trace, root: int, fqn: str, *, before: int) -> bool:
    """Whether a module returned something finite in a call before the one with this number."""
    returned = [s for s, site in trace.measured() if (site.kind, site.root, site.fqn) == ("output", root, fqn)]
    return any(sample.finite and sample.call < before for sample in returned)


USUAL = frozenset({"float16", "bfloat16"})
"""Dtypes of quantization states that every dequantizer has a kernel for."""


def doubtful_weights(trace: Trace) -> bool:
    """Whether the packed weights of a model are worth comparing with what is multiplied, and were not.

    That is a model whose quantization states say something else than those of a model before it in the same process (which
    may have left a buffer of its dtype behind), or something that is no 16-bit dtype (for which a kernel may be missing).
    Its first call is compared: made again, where its weights are multiplied inside of a custom operator there is nothing to compare with.
    """
    before: set[str] = set()
    for root, dtypes in sorted(_states(trace).items()):
        if dtypes - USUAL or (before and not dtypes <= before):
            calls = (sample.call for sample, site in trace.measured() if (site.root, site.kind) == (root, "output"))
            call = next(calls, None)
            compared = (*trace.observed(PackedWeight), *trace.observed(ReplayedCall))
            return call is not None and not any(seen.call == call for seen in compared)
        before |= dtypes
    return False


def _states(trace: Trace) -> dict[int, set[str]]:
    """The dtypes that the quantization states of each outermost module say."""
    states: dict[int, set[str]] = defaultdict(set)
    for note in trace.all(ParameterNote):
        if note.quant and note.quant.get("dtype"):
            states[note.root].add(str(note.quant["dtype"]))
    return states
